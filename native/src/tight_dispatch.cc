// Which passes of `tight` run: those of the instruction set that is in use.
#include "kernels.h"
#include "tight_blocks.h"

namespace syncline {
namespace {

const TightTable& selected_table() noexcept {
#if defined(__x86_64__)
  switch (selected_isa()) {
    case Isa::avx512:
      return avx512_tight_table;
    case Isa::avx2:
      return avx2_tight_table;
    default:
      break;
  }
#endif
  return scalar_tight_table;
}

}  // namespace

TightOutcome rank_changes(const RankTask& task, unsigned unit_bytes) noexcept {
  return selected_table().rank(task, unit_bytes);
}

TightOutcome find_changes(const FindTask& task, unsigned unit_bytes) noexcept {
  return selected_table().find(task, unit_bytes);
}

}  // namespace syncline
