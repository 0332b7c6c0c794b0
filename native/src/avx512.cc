// AVX-512 with BW, DQ and VBMI2: Ice Lake, Zen 4 and later.
#include <immintrin.h>

#include "blocks.h"

namespace syncline {
namespace {

struct Avx512 {
  using Word = __m512i;
  static constexpr std::size_t kLanes = 8;

  static Word load(const void* at) noexcept { return _mm512_loadu_si512(at); }
  static Word zero() noexcept { return _mm512_setzero_si512(); }
  static Word add(Word a, Word b) noexcept { return _mm512_add_epi64(a, b); }
  static Word mul32(Word a, Word b) noexcept { return _mm512_mul_epu32(a, b); }
  static Word mul64(Word a, std::uint64_t b) noexcept {
    return _mm512_mullo_epi64(a, _mm512_set1_epi64(static_cast<long long>(b)));
  }
  // Not _mm512_reduce_add_epi64: it adds signed numbers, which must not wrap.
  static std::uint64_t sum(Word a) noexcept {
    alignas(64) std::uint64_t lanes[kLanes];
    _mm512_store_si512(lanes, a);
    std::uint64_t total = 0;
    for (const std::uint64_t lane : lanes) total += lane;
    return total;
  }

  template <std::size_t W>
  static Word digit(Word data, std::size_t i) noexcept {
    const Word low = _mm512_srli_epi64(data, static_cast<unsigned>(8 * W * i));
    if constexpr (W == 4) return low;
    return _mm512_and_si512(low, _mm512_set1_epi64((1 << 8 * (W & 3)) - 1));
  }
  template <std::size_t W>
  static Word mul_key(Word square, Word key) noexcept {
    if constexpr (W == 4) return _mm512_mullo_epi64(square, key);
    return mul32(square, key);
  }

  template <std::size_t W>
  static std::uint64_t differing(const unsigned char* a, const unsigned char* b) noexcept {
    std::uint64_t mask = 0;
    for (std::size_t v = 0; v < W; ++v) {
      const Word x = load(a + 64 * v);
      const Word y = load(b + 64 * v);
      if constexpr (W == 1) mask = _mm512_cmpneq_epi8_mask(x, y);
      if constexpr (W == 2) mask |= std::uint64_t{_mm512_cmpneq_epi16_mask(x, y)} << 32 * v;
      if constexpr (W == 4) mask |= std::uint64_t{_mm512_cmpneq_epi32_mask(x, y)} << 16 * v;
      if constexpr (W == 8) mask |= std::uint64_t{_mm512_cmpneq_epi64_mask(x, y)} << 8 * v;
    }
    return mask;
  }

  // Where many change, whole vectors are compressed: 64 units of room behind `found` are written over.
  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    if (std::popcount(mask) < 12) return emit_bits<W>(task, at, mask, found);
    std::size_t placed = found;
    for (std::size_t v = 0; v < 4; ++v) {
      const auto bits = static_cast<__mmask16>(mask >> 16 * v);
      const Word first = _mm512_set1_epi32(static_cast<int>(at + 16 * v));
      const Word places = _mm512_add_epi32(first, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
      _mm512_storeu_si512(task.offsets + placed, _mm512_maskz_compress_epi32(bits, places));
      placed += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(bits)));
    }
    placed = found;
    constexpr std::size_t kPerVector = 64 / W;
    for (std::size_t v = 0; v < W; ++v) {
      const std::uint64_t bits = mask >> kPerVector * v & (~std::uint64_t{0} >> (64 - kPerVector));
      const Word old_bits = load(task.old_bits + at * W + 64 * v);
      const Word new_bits = load(task.new_bits + at * W + 64 * v);
      _mm512_storeu_si512(task.changed_old + placed * W, compress<W>(bits, old_bits));
      _mm512_storeu_si512(task.changed_new + placed * W, compress<W>(bits, new_bits));
      if (task.refresh) _mm512_storeu_si512(task.old_bits + at * W + 64 * v, new_bits);
      placed += static_cast<std::size_t>(std::popcount(bits));
    }
  }

  template <std::size_t W>
  static Word compress(std::uint64_t bits, Word from) noexcept {
    if constexpr (W == 1) return _mm512_maskz_compress_epi8(bits, from);
    if constexpr (W == 2) return _mm512_maskz_compress_epi16(static_cast<__mmask32>(bits), from);
    if constexpr (W == 4) return _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), from);
    return _mm512_maskz_compress_epi64(static_cast<__mmask8>(bits), from);
  }
};

}  // namespace

constinit const Table avx512_table = table_of<Avx512>();

}  // namespace syncline
