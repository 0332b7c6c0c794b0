// AVX2: every x86-64 server since 2015.
#include <immintrin.h>

#include "blocks.h"

namespace syncline {
namespace {

struct Avx2 {
  using Word = __m256i;
  static constexpr std::size_t kLanes = 4;

  static Word load(const void* at) noexcept { return _mm256_loadu_si256(static_cast<const Word*>(at)); }
  static Word zero() noexcept { return _mm256_setzero_si256(); }
  static Word add(Word a, Word b) noexcept { return _mm256_add_epi64(a, b); }
  static Word mul32(Word a, Word b) noexcept { return _mm256_mul_epu32(a, b); }
  // The low 64 bits of a product, from three products of halves.
  static Word mul_wide(Word a, Word b) noexcept {
    const Word cross = add(mul32(_mm256_srli_epi64(a, 32), b), mul32(a, _mm256_srli_epi64(b, 32)));
    return add(mul32(a, b), _mm256_slli_epi64(cross, 32));
  }
  static Word mul64(Word a, std::uint64_t b) noexcept {
    return mul_wide(a, _mm256_set1_epi64x(static_cast<long long>(b)));
  }
  static std::uint64_t sum(Word a) noexcept {
    alignas(32) std::uint64_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<Word*>(lanes), a);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }

  template <std::size_t W>
  static Word digit(Word data, std::size_t i) noexcept {
    const Word low = _mm256_srli_epi64(data, static_cast<int>(8 * W * i));
    if constexpr (W == 4) return low;
    return _mm256_and_si256(low, _mm256_set1_epi64x((1 << 8 * (W & 3)) - 1));
  }
  template <std::size_t W>
  static Word mul_key(Word square, Word key) noexcept {
    if constexpr (W == 4) return mul_wide(square, key);
    return mul32(square, key);
  }

  template <std::size_t W>
  static std::uint64_t differing(const unsigned char* a, const unsigned char* b) noexcept {
    std::uint64_t same = 0;
    if constexpr (W == 2) {
      for (std::size_t v = 0; v < 4; v += 2) {
        const Word low = _mm256_cmpeq_epi16(load(a + 32 * v), load(b + 32 * v));
        const Word high = _mm256_cmpeq_epi16(load(a + 32 * v + 32), load(b + 32 * v + 32));
        // packs works within 128-bit lanes, so the quarters are put back in order.
        const Word bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
        same |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes))} << 16 * v;
      }
    } else {
      for (std::size_t v = 0; v < 2 * W; ++v) {
        const Word x = load(a + 32 * v);
        const Word y = load(b + 32 * v);
        if constexpr (W == 1) {
          const int bits = _mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y));
          same |= std::uint64_t{static_cast<std::uint32_t>(bits)} << 32 * v;
        } else if constexpr (W == 4) {
          const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, y)));
          same |= static_cast<std::uint64_t>(bits) << 8 * v;
        } else {
          const int bits = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(x, y)));
          same |= static_cast<std::uint64_t>(bits) << 4 * v;
        }
      }
    }
    return ~same;
  }

  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    emit_bits<W>(task, at, mask, found);
  }
};

}  // namespace

constinit const Table avx2_table = table_of<Avx2>();

}  // namespace syncline
