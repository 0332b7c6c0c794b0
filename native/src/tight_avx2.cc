// The passes of `tight` with AVX2, BMI and BMI2: Haswell, Zen and later.
#include <immintrin.h>

#include "tight_blocks.h"

namespace syncline {
namespace {

struct TightAvx2 {
  template <unsigned C>
  using Left = PlainLeft<C>;

  static __m256i load(const unsigned char* at) noexcept {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  static __m256i byte(std::uint32_t value) noexcept { return _mm256_set1_epi8(static_cast<char>(value)); }

  // Exponents of 32 units of 1, 2 or 4 bytes as bytes, in order.
  template <std::size_t W>
  static __m256i exponents(const unsigned char* units, const ClassMap& map) noexcept {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(map.shift));
    if constexpr (W == 1) {
      return _mm256_and_si256(_mm256_srl_epi16(load(units), shift), byte(map.mask));
    } else if constexpr (W == 2) {
      const __m256i mask = _mm256_set1_epi16(static_cast<short>(map.mask));
      const __m256i a = _mm256_and_si256(_mm256_srl_epi16(load(units), shift), mask);
      const __m256i b = _mm256_and_si256(_mm256_srl_epi16(load(units + 32), shift), mask);
      return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
    } else {
      const __m256i mask = _mm256_set1_epi32(static_cast<int>(map.mask));
      const auto part = [&](std::size_t i) {
        return _mm256_and_si256(_mm256_srl_epi32(load(units + 32 * i), shift), mask);
      };
      const __m256i low = _mm256_packus_epi32(part(0), part(1));
      const __m256i high = _mm256_packus_epi32(part(2), part(3));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    }
  }

  template <std::size_t W, unsigned C>
  static void classify(const unsigned char* units, const ClassMap& map, Block* block) noexcept {
    if constexpr (W == 8) {
      classify_some<8, C>(units, kBlock, map, block);
    } else {
      __m256i half[2];
      for (std::size_t i = 0; i < 2; ++i) {
        const __m256i above = _mm256_subs_epu8(exponents<W>(units + 32 * W * i, map), byte(map.lowest));
        half[i] = _mm256_min_epu8(above, byte(map.count - 1));
        _mm256_store_si256(reinterpret_cast<__m256i*>(block->class_of + 32 * i), half[i]);
      }
      __m256i wanted = _mm256_setzero_si256();
      for (unsigned c = 0; c < C; ++c) {
        const auto low = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(half[0], wanted)));
        const auto high = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(half[1], wanted)));
        block->members[c] = low | std::uint64_t{high} << 32;
        wanted = _mm256_add_epi8(wanted, byte(1));
      }
    }
  }

  static std::uint64_t select(std::uint64_t mask, std::uint64_t rank) noexcept {
    return _pdep_u64(std::uint64_t{1} << rank, mask);
  }
};

}  // namespace

constinit const TightTable avx2_tight_table = {rank_all<TightAvx2>, find_all<TightAvx2>};

}  // namespace syncline
