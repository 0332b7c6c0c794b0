// NEON, which every 64-bit Arm processor has.
#include <arm_neon.h>

#include "blocks.h"

namespace syncline {
namespace {

struct Neon {
  using Word = uint64x2_t;
  static constexpr std::size_t kLanes = 2;
  static constexpr std::size_t kGroupsAtOnce = 4;

  static Word load(const void* at) noexcept {
    return vreinterpretq_u64_u8(vld1q_u8(static_cast<const unsigned char*>(at)));
  }
  // Kept in a register: the compiler would otherwise read memory again for every use.
  static Word load_once(const void* at) noexcept {
    Word word = load(at);
    asm("" : "+w"(word));
    return word;
  }
  static Word zero() noexcept { return vdupq_n_u64(0); }
  static Word add(Word a, Word b) noexcept { return vaddq_u64(a, b); }
  static Word mul32(Word a, Word b) noexcept { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
  static Word mul64(Word a, std::uint64_t b) noexcept {
    return vcombine_u64(vcreate_u64(vgetq_lane_u64(a, 0) * b), vcreate_u64(vgetq_lane_u64(a, 1) * b));
  }
  static std::uint64_t sum(Word a) noexcept { return vaddvq_u64(a); }

  template <std::size_t W>
  static Word digit(Word data, std::size_t i) noexcept {
    const Word low = vshlq_u64(data, vdupq_n_s64(-static_cast<std::int64_t>(8 * W * i)));
    if (W == 4 || i + 1 == 8 / W) return low;
    return vandq_u64(low, vdupq_n_u64((1 << 8 * W % 32) - 1));
  }
  template <std::size_t W>
  static Word add_product(Word sum, Word square, Word key) noexcept {
    const Word product = add(sum, mul32(square, key));
    if constexpr (W < 4) return product;
    return add(product, vshlq_n_u64(mul32(vshrq_n_u64(square, 32), key), 32));
  }

  template <std::size_t W>
  static std::uint64_t differing(const unsigned char* a, const unsigned char* b) noexcept {
    const uint8x8_t weights = vcreate_u8(0x8040201008040201u);
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      const uint8x8_t equal = equal_8<W>(a + 8 * W * i, b + 8 * W * i);
      mask |= std::uint64_t{vaddv_u8(vbic_u8(weights, equal))} << 8 * i;
    }
    return mask;
  }

  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    emit_by_bits<W>(task, at, mask, found);
  }

  // Eight units: a byte of ones for each that is equal.
  template <std::size_t W>
  static uint8x8_t equal_8(const unsigned char* a, const unsigned char* b) noexcept {
    if constexpr (W == 1) return vceq_u8(vld1_u8(a), vld1_u8(b));
    if constexpr (W == 2) {
      return vmovn_u16(vceqq_u16(vreinterpretq_u16_u8(vld1q_u8(a)), vreinterpretq_u16_u8(vld1q_u8(b))));
    }
    if constexpr (W == 4) {
      const auto half = [&](std::size_t at) {
        return vmovn_u32(vceqq_u32(vreinterpretq_u32_u8(vld1q_u8(a + at)), vreinterpretq_u32_u8(vld1q_u8(b + at))));
      };
      return vmovn_u16(vcombine_u16(half(0), half(16)));
    }
    if constexpr (W == 8) {
      const auto quarter = [&](std::size_t at) { return vmovn_u64(vceqq_u64(load(a + at), load(b + at))); };
      const auto half = [&](std::size_t at) { return vmovn_u32(vcombine_u32(quarter(at), quarter(at + 16))); };
      return vmovn_u16(vcombine_u16(half(0), half(32)));
    }
  }
};

}  // namespace

constinit const Table neon_table = table_of<Neon>();

}  // namespace syncline
