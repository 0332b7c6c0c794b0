// The passes of `tight` with AVX-512 (VPOPCNTDQ among it) and BMI2: Ice Lake, Zen 4 and later.
#include <immintrin.h>

#include "tight_blocks.h"

namespace syncline {
namespace {

template <unsigned C>
class VectorLeft {
 public:
  explicit VectorLeft(const std::int64_t* left) noexcept {
    for (unsigned v = 0; v < kVectors; ++v) left_[v] = _mm512_loadu_si512(left + 8 * v);
  }
  unsigned take(const std::uint64_t* members) noexcept {
    unsigned short_of = 0;
    for (unsigned v = 0; v < kVectors; ++v) {
      left_[v] = _mm512_sub_epi64(left_[v], _mm512_popcnt_epi64(_mm512_load_si512(members + 8 * v)));
      short_of |= static_cast<unsigned>(_mm512_movepi64_mask(left_[v])) << 8 * v;
    }
    return short_of;
  }
  std::int64_t get(unsigned c) const noexcept {
    const __m512i lane = _mm512_set1_epi64(c);
    __m512i found = _mm512_permutexvar_epi64(lane, left_[0]);
    if (kVectors == 2 && c >= 8) found = _mm512_permutexvar_epi64(lane, left_[kVectors - 1]);
    return _mm_cvtsi128_si64(_mm512_castsi512_si128(found));
  }
  void set(unsigned c, std::int64_t left) noexcept {
    for (unsigned v = 0; v < kVectors; ++v) {
      const auto lane = static_cast<__mmask8>((1u << c) >> 8 * v);
      left_[v] = _mm512_mask_set1_epi64(left_[v], lane, left);
    }
  }

 private:
  static constexpr unsigned kVectors = (C + 7) / 8;
  __m512i left_[kVectors];
};

struct TightAvx512 {
  template <unsigned C>
  using Left = VectorLeft<C>;

  static __m512i load(const unsigned char* at) noexcept { return _mm512_loadu_si512(at); }

  // Exponents of 64 units as bytes, less the lowest and clamped.
  template <std::size_t W>
  static __m512i classes(const unsigned char* units, const ClassMap& map) noexcept {
    const auto shift = static_cast<unsigned>(map.shift);
    if constexpr (W == 8) {
      const __m512i mask = _mm512_set1_epi64(map.mask);
      const __m512i lowest = _mm512_set1_epi64(map.lowest);
      const __m512i last = _mm512_set1_epi64(map.count - 1);
      alignas(64) std::uint8_t bytes[kBlock];
      for (std::size_t i = 0; i < 8; ++i) {
        const __m512i exponent = _mm512_and_si512(_mm512_srli_epi64(load(units + 64 * i), shift), mask);
        const __m512i above = _mm512_sub_epi64(_mm512_max_epu64(exponent, lowest), lowest);
        const __m128i eight = _mm512_cvtepi64_epi8(_mm512_min_epu64(above, last));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes + 8 * i), eight);
      }
      return load(bytes);
    } else {
      __m512i exponents;
      if constexpr (W == 1) {
        exponents = _mm512_srli_epi16(load(units), shift);
      } else if constexpr (W == 2) {
        const __m512i low = _mm512_srli_epi16(load(units), shift);
        const __m512i high = _mm512_srli_epi16(load(units + 64), shift);
        const __m512i first = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(low));
        exponents = _mm512_inserti64x4(first, _mm512_cvtepi16_epi8(high), 1);
      } else {
        const __m128i a = _mm512_cvtepi32_epi8(_mm512_srli_epi32(load(units), shift));
        const __m128i b = _mm512_cvtepi32_epi8(_mm512_srli_epi32(load(units + 64), shift));
        const __m128i c = _mm512_cvtepi32_epi8(_mm512_srli_epi32(load(units + 128), shift));
        const __m128i d = _mm512_cvtepi32_epi8(_mm512_srli_epi32(load(units + 192), shift));
        exponents = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(b, a)), _mm256_set_m128i(d, c), 1);
      }
      const auto byte = [](std::uint32_t value) { return _mm512_set1_epi8(static_cast<char>(value)); };
      exponents = _mm512_and_si512(exponents, byte(map.mask));
      return _mm512_min_epu8(_mm512_subs_epu8(exponents, byte(map.lowest)), byte(map.count - 1));
    }
  }

  template <std::size_t W, unsigned C>
  static void classify(const unsigned char* units, const ClassMap& map, Block* block) noexcept {
    const __m512i found = classes<W>(units, map);
    _mm512_store_si512(block->class_of, found);
    __m512i wanted = _mm512_setzero_si512();
    for (unsigned c = 0; c < C; ++c) {
      block->members[c] = _mm512_cmpeq_epi8_mask(found, wanted);
      wanted = _mm512_add_epi8(wanted, _mm512_set1_epi8(1));
    }
  }

  static std::uint64_t select(std::uint64_t mask, std::uint64_t rank) noexcept {
    return _pdep_u64(std::uint64_t{1} << rank, mask);
  }
};

}  // namespace

constinit const TightTable avx512_tight_table = {rank_all<TightAvx512>, find_all<TightAvx512>};

}  // namespace syncline
