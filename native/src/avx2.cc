// AVX2 with BMI and POPCNT: Haswell, Zen and later.
#include <immintrin.h>

#include "blocks.h"

namespace syncline {
namespace {

struct Avx2 {
  using Word = __m256i;
  static constexpr std::size_t kLanes = 4;
  static constexpr std::size_t kGroupsAtOnce = 4;

  static Word load(const void* at) noexcept { return _mm256_loadu_si256(static_cast<const Word*>(at)); }
  // Kept in a register: the compiler would otherwise read memory again for every use.
  static Word load_once(const void* at) noexcept {
    Word word = load(at);
    asm("" : "+x"(word));
    return word;
  }
  static Word zero() noexcept { return _mm256_setzero_si256(); }
  static Word add(Word a, Word b) noexcept { return _mm256_add_epi64(a, b); }
  static Word mul32(Word a, Word b) noexcept { return _mm256_mul_epu32(a, b); }
  static Word mul64(Word a, std::uint64_t b) noexcept {
    const Word key = _mm256_set1_epi64x(static_cast<long long>(b));
    const Word high_low = mul32(_mm256_srli_epi64(a, 32), key);
    const Word low_high = mul32(a, _mm256_srli_epi64(key, 32));
    return add(mul32(a, key), _mm256_slli_epi64(add(high_low, low_high), 32));
  }
  static std::uint64_t sum(Word a) noexcept {
    alignas(32) std::uint64_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<Word*>(lanes), a);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }

  template <std::size_t W>
  static Word digit(Word data, std::size_t i) noexcept {
    const Word low = _mm256_srli_epi64(data, static_cast<int>(8 * W * i));
    if (W == 4 || i + 1 == 8 / W) return low;
    return _mm256_and_si256(low, _mm256_set1_epi64x((1 << 8 * W % 32) - 1));
  }
  template <std::size_t W>
  static Word add_product(Word sum, Word square, Word key) noexcept {
    const Word product = add(sum, mul32(square, key));
    if constexpr (W < 4) return product;
    return add(product, _mm256_slli_epi64(mul32(_mm256_srli_epi64(square, 32), key), 32));
  }

  template <std::size_t W>
  static std::uint64_t differing(const unsigned char* a, const unsigned char* b) noexcept {
    std::uint64_t equal = 0;
    if constexpr (W == 2) {
      for (std::size_t v = 0; v < W; ++v) {
        // Packing works within 128-bit halves; the permutation puts the quarters back in order.
        const Word packed = _mm256_packs_epi16(equal_units<W>(a, b, 2 * v), equal_units<W>(a, b, 2 * v + 1));
        const Word ordered = _mm256_permute4x64_epi64(packed, 0b11011000);
        equal |= std::uint64_t{bits(_mm256_movemask_epi8(ordered))} << 32 * v;
      }
    } else {
      for (std::size_t v = 0; v < 2 * W; ++v) {
        equal |= std::uint64_t{first_bits<W>(equal_units<W>(a, b, v))} << 32 / W * v;
      }
    }
    return ~equal;
  }

  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    emit_by_bits<W>(task, at, mask, found);
  }

  template <std::size_t W>
  static Word equal_units(const unsigned char* a, const unsigned char* b, std::size_t vector) noexcept {
    const Word x = load(a + 32 * vector);
    const Word y = load(b + 32 * vector);
    if constexpr (W == 1) return _mm256_cmpeq_epi8(x, y);
    if constexpr (W == 2) return _mm256_cmpeq_epi16(x, y);
    if constexpr (W == 4) return _mm256_cmpeq_epi32(x, y);
    if constexpr (W == 8) return _mm256_cmpeq_epi64(x, y);
  }
  // The first bit of every unit.
  template <std::size_t W>
  static std::uint32_t first_bits(Word units) noexcept {
    if constexpr (W == 1) return bits(_mm256_movemask_epi8(units));
    if constexpr (W == 4) return bits(_mm256_movemask_ps(_mm256_castsi256_ps(units)));
    if constexpr (W == 8) return bits(_mm256_movemask_pd(_mm256_castsi256_pd(units)));
  }
  static std::uint32_t bits(int mask) noexcept { return static_cast<std::uint32_t>(mask); }
};

}  // namespace

constinit const Table avx2_table = table_of<Avx2>();

}  // namespace syncline
