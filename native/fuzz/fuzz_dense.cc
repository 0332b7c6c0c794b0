// Any units, on any instruction set: planes of them are joined to the same again, and a difference, where there is room
// for only a few changes at a time, makes the old the new ones. For libFuzzer, or standalone.cc.
#include <algorithm>
#include <cstdlib>

#include "kernels.h"
#include "source.h"

using namespace syncline;

namespace {

void check_planes(const std::vector<unsigned char>& units, unsigned unit_bytes, bool rotated) {
  const std::size_t count = units.size() / unit_bytes;
  std::vector<unsigned char> planes(units.size());
  std::vector<unsigned char> again(units.size());
  split_planes(units.data(), count, unit_bytes, rotated, planes.data());
  const unsigned char* from[8];
  for (unsigned plane = 0; plane < unit_bytes; ++plane) from[plane] = planes.data() + plane * count;
  join_planes(from, count, unit_bytes, rotated, again.data());
  if (again != units) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const unsigned unit_bytes = 1u << in.number(4);
  const bool rotated = in.number(2) != 0;
  const std::size_t room = 1 + in.number(300);
  select_isa(static_cast<Isa>(in.number(kIsaCount)));
  const std::size_t count = in.size() / (2 * unit_bytes);
  auto old_bits = in.list(count * unit_bytes);
  const auto new_bits = in.list(count * unit_bytes);
  check_planes(new_bits, unit_bytes, rotated);
  for (std::size_t begin = 0; begin < count;) {
    std::vector<std::uint32_t> offsets(room);
    std::vector<unsigned char> olds(room * unit_bytes);
    std::vector<unsigned char> news(room * unit_bytes);
    const Progress progress = diff({old_bits.data(), new_bits.data(), begin, count, true, offsets.data(), olds.data(),
                                    news.data(), room},
                                   unit_bytes);
    if (progress.found > room || progress.stop <= begin || progress.stop > count) std::abort();
    begin = progress.stop;
  }
  if (old_bits != new_bits) std::abort();
  return 0;
}
