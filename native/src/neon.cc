// NEON: every 64-bit Arm.
#include <arm_neon.h>

#include "blocks.h"

namespace syncline {
namespace {

struct Neon {
  using Word = uint64x2_t;
  static constexpr std::size_t kLanes = 2;

  static Word load(const void* at) noexcept { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const std::uint8_t*>(at))); }
  static Word zero() noexcept { return vdupq_n_u64(0); }
  static Word add(Word a, Word b) noexcept { return vaddq_u64(a, b); }
  static Word mul32(Word a, Word b) noexcept { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
  // The low 64 bits of a product, from three products of halves.
  static Word mul_wide(Word a, Word b) noexcept {
    const Word cross = add(mul32(vshrq_n_u64(a, 32), b), mul32(a, vshrq_n_u64(b, 32)));
    return add(mul32(a, b), vshlq_n_u64(cross, 32));
  }
  static Word mul64(Word a, std::uint64_t b) noexcept { return mul_wide(a, vdupq_n_u64(b)); }
  static std::uint64_t sum(Word a) noexcept { return vgetq_lane_u64(a, 0) + vgetq_lane_u64(a, 1); }

  template <std::size_t W>
  static Word digit(Word data, std::size_t i) noexcept {
    const Word low = vshlq_u64(data, vdupq_n_s64(-static_cast<std::int64_t>(8 * W * i)));
    if constexpr (W == 4) return low;
    return vandq_u64(low, vdupq_n_u64((1u << 8 * (W & 3)) - 1));
  }
  template <std::size_t W>
  static Word mul_key(Word square, Word key) noexcept {
    if constexpr (W == 4) return mul_wide(square, key);
    return mul32(square, key);
  }

  // A difference is rare: one look at 16 bytes decides whether units are compared one by one.
  template <std::size_t W>
  static std::uint64_t differing(const unsigned char* a, const unsigned char* b) noexcept {
    std::uint64_t mask = 0;
    constexpr std::size_t kPerVector = 16 / W;
    for (std::size_t v = 0; v < 4 * W; ++v) {
      const uint8x16_t apart = veorq_u8(vld1q_u8(a + 16 * v), vld1q_u8(b + 16 * v));
      if (vmaxvq_u8(apart) == 0) continue;
      for (std::size_t i = v * kPerVector; i < (v + 1) * kPerVector; ++i) {
        mask |= std::uint64_t{load_unit<W>(a + i * W) != load_unit<W>(b + i * W)} << i;
      }
    }
    return mask;
  }
  template <std::size_t W>
  static Unit<W> load_unit(const unsigned char* at) noexcept {
    return syncline::load<Unit<W>>(at);
  }

  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    emit_bits<W>(task, at, mask, found);
  }
};

}  // namespace

constinit const Table neon_table = table_of<Neon>();

}  // namespace syncline
