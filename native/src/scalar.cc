// The reference: one unit after the other. Built with auto-vectorisation off, so that it stays one.
#include "blocks.h"

namespace syncline {
namespace {

struct Scalar {
  using Word = std::uint64_t;
  static constexpr std::size_t kLanes = 1;

  static Word load(const void* at) noexcept {
    return syncline::load<std::uint64_t>(static_cast<const unsigned char*>(at));
  }
  static Word zero() noexcept { return 0; }
  static Word add(Word a, Word b) noexcept { return a + b; }
  static Word mul32(Word a, Word b) noexcept {
    return std::uint64_t{static_cast<std::uint32_t>(a)} * static_cast<std::uint32_t>(b);
  }
  static Word mul64(Word a, std::uint64_t b) noexcept { return a * b; }
  static std::uint64_t sum(Word a) noexcept { return a; }

  template <std::size_t W>
  static Word digit(Word data, std::size_t i) noexcept {
    return static_cast<Unit<W>>(data >> 8 * W * i);
  }
  template <std::size_t W>
  static Word mul_key(Word square, Word key) noexcept {
    return square * key;
  }

  template <std::size_t W>
  static std::uint64_t differing(const unsigned char* a, const unsigned char* b) noexcept {
    std::uint64_t mask = 0;
    for (std::size_t i = 0; i < kGroup; ++i) {
      mask |= std::uint64_t{syncline::load<Unit<W>>(a + i * W) != syncline::load<Unit<W>>(b + i * W)} << i;
    }
    return mask;
  }

  template <std::size_t W>
  static void emit(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
    emit_bits<W>(task, at, mask, found);
  }
};

}  // namespace

constinit const Table scalar_table = table_of<Scalar>();

}  // namespace syncline
