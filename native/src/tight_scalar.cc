// The passes of `tight` without vectors: the reference for the others.
#include "tight_blocks.h"

namespace syncline {
namespace {

struct Scalar {
  template <unsigned C>
  using Left = PlainLeft<C>;

  template <std::size_t W, unsigned C>
  static void classify(const unsigned char* units, const ClassMap& map, Block* block) noexcept {
    classify_some<W, C>(units, kBlock, map, block);
  }
  // The set bit of `mask` that has `rank` set bits below it.
  static std::uint64_t select(std::uint64_t mask, std::uint64_t rank) noexcept {
    for (; rank != 0; --rank) mask &= mask - 1;
    return mask & (~mask + 1);
  }
};

}  // namespace

constinit const TightTable scalar_tight_table = {rank_all<Scalar>, find_all<Scalar>};

}  // namespace syncline
