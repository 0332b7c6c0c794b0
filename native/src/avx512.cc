// AVX-512 with VBMI2 (compress bytes) and IFMA (52-bit multiply-add): Ice Lake, Zen 4 and later.
#include <immintrin.h>

#include <array>

#include "blocks.h"

namespace syncline {
namespace {

struct Avx512 {
  using Word = __m512i;
  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kGroupsAtOnce = 2;

  static Word load(const void* at) noexcept { return _mm512_loadu_si512(at); }
  // Kept in a register: the compiler would otherwise read memory again for every use.
  static Word load_once(const void* at) noexcept {
    Word word = load(at);
    asm("" : "+v"(word));
    return word;
  }
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
    if (W == 4 || i + 1 == 8 / W) return low;
    return _mm512_and_si512(low, _mm512_set1_epi64((1 << 8 * W % 32) - 1));
  }
  // The square of a byte times a key fits in 52 bits.
  template <std::size_t W>
  static Word add_product(Word sum, Word square, Word key) noexcept {
    if constexpr (W == 1) return _mm512_madd52lo_epu64(sum, square, key);
    if constexpr (W == 2) return add(sum, mul32(square, key));
    return add(sum, _mm512_mullo_epi64(square, key));
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

  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    emit_offsets(task.offsets + found, at, mask);
    for (std::size_t v = 0; v < W; ++v) {
      unsigned char* old_at = task.old_bits + at * W + 64 * v;
      const auto part = static_cast<Mask<W>>(mask >> 64 / W * v);
      const Word fresh = load(task.new_bits + at * W + 64 * v);
      _mm512_storeu_si512(task.changed_old + found * W, compress(part, load(old_at)));
      _mm512_storeu_si512(task.changed_new + found * W, compress(part, fresh));
      if (task.refresh) store_masked(old_at, part, fresh);
      found += static_cast<std::size_t>(std::popcount(part));
    }
  }

  static void emit_offsets(std::uint32_t* to, std::size_t at, std::uint64_t mask) noexcept {
    static constexpr auto kCounting = [] {
      std::array<unsigned char, kGroup> all{};
      for (std::size_t i = 0; i < kGroup; ++i) all[i] = static_cast<unsigned char>(i);
      return all;
    }();
    const Word places = _mm512_maskz_compress_epi8(mask, load(kCounting.data()));
    const Word first = _mm512_set1_epi32(static_cast<int>(at));
    const auto write = [&](std::size_t i, __m128i bytes) {
      _mm512_storeu_si512(to + 16 * i, _mm512_add_epi32(first, _mm512_cvtepu8_epi32(bytes)));
    };
    write(0, _mm512_castsi512_si128(places));
    if (std::popcount(mask) <= 16) return;
    write(1, _mm512_extracti32x4_epi32(places, 1));
    write(2, _mm512_extracti32x4_epi32(places, 2));
    write(3, _mm512_extracti32x4_epi32(places, 3));
  }

  // The type of a mask names the width of its units: the 64 / W units of a vector have a bit each.
  template <std::size_t W>
  using Mask = Unit<8 / W>;
  static Word compress(Mask<1> mask, Word from) noexcept { return _mm512_maskz_compress_epi8(mask, from); }
  static Word compress(Mask<2> mask, Word from) noexcept { return _mm512_maskz_compress_epi16(mask, from); }
  static Word compress(Mask<4> mask, Word from) noexcept { return _mm512_maskz_compress_epi32(mask, from); }
  static Word compress(Mask<8> mask, Word from) noexcept { return _mm512_maskz_compress_epi64(mask, from); }
  static void store_masked(void* at, Mask<1> mask, Word from) noexcept { _mm512_mask_storeu_epi8(at, mask, from); }
  static void store_masked(void* at, Mask<2> mask, Word from) noexcept { _mm512_mask_storeu_epi16(at, mask, from); }
  static void store_masked(void* at, Mask<4> mask, Word from) noexcept { _mm512_mask_storeu_epi32(at, mask, from); }
  static void store_masked(void* at, Mask<8> mask, Word from) noexcept { _mm512_mask_storeu_epi64(at, mask, from); }
};

}  // namespace

constinit const Table avx512_table = table_of<Avx512>();

}  // namespace syncline
