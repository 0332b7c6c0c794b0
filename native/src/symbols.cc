// The values of `packed`: how each change is told from the base, in symbols of a few bits and an excess for the rest.
#include <algorithm>

#include "table.h"

namespace syncline {
namespace {

constexpr std::size_t kBlock = 64;
constexpr std::size_t kFewBelow = 15;  // what symbols of 4 bits tell without an excess

template <std::size_t W>
Unit<W> told(Unit<W> before, Unit<W> fresh, bool is_step) noexcept {
  if (!is_step) return static_cast<Unit<W>>(before ^ fresh);
  const auto distance = static_cast<Unit<W>>(fresh - before);
  const auto sign = static_cast<Unit<W>>(Unit<W>{0} - (distance >> (8 * W - 1)));
  return static_cast<Unit<W>>((distance << 1) ^ sign);
}

template <std::size_t W>
Unit<W> untold(Unit<W> before, Unit<W> value, bool is_step) noexcept {
  if (!is_step) return static_cast<Unit<W>>(before ^ value);
  const auto sign = static_cast<Unit<W>>(Unit<W>{0} - (value & 1));
  return static_cast<Unit<W>>(before + ((value >> 1) ^ sign));
}

// Values that are all 0 or 1 in one bit each; returns how many are 1, which is the escape. Loops over a block at a
// time are what compilers make vector code of.
template <std::size_t W>
std::size_t write_bits(const unsigned char* old_bits, const unsigned char* new_bits, std::size_t count, bool is_step,
                       unsigned char* symbols) noexcept {
  std::size_t ones = 0;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    unsigned char values[kBlock] = {};
    const std::size_t size = std::min(kBlock, count - begin);
    for (std::size_t i = 0; i < size; ++i) {
      const auto before = load<Unit<W>>(old_bits + (begin + i) * W);
      const auto fresh = load<Unit<W>>(new_bits + (begin + i) * W);
      values[i] = static_cast<unsigned char>(told<W>(before, fresh, is_step) - 1);
    }
    for (std::size_t i = 0; i < size; i += 8) {
      // The product has byte i, which is 0 or 1, at bit 56 + i; nothing below carries.
      const auto packed = static_cast<unsigned char>(load<std::uint64_t>(values + i) * 0x0102040810204080u >> 56);
      ones += static_cast<std::size_t>(__builtin_popcount(packed));
      *symbols++ = packed;
    }
  }
  return ones;
}

template <std::size_t W>
SymbolCounts write_width(const unsigned char* old_bits, const unsigned char* new_bits, std::size_t count, bool is_step,
                         unsigned char* symbols, unsigned char* excess) noexcept {
  std::size_t small = 0, few = 0;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    unsigned small_here = 0, few_here = 0;
    const std::size_t end = std::min(begin + kBlock, count);
    for (std::size_t i = begin; i < end; ++i) {
      const auto value = static_cast<Unit<W>>(
          told<W>(load<Unit<W>>(old_bits + i * W), load<Unit<W>>(new_bits + i * W), is_step) - 1);
      small_here += value <= 1;
      few_here += value < kFewBelow;
    }
    small += small_here;
    few += few_here;
  }
  if (small == count) {
    const std::size_t ones = write_bits<W>(old_bits, new_bits, count, is_step, symbols);
    std::fill_n(excess, ones * W, static_cast<unsigned char>(0));
    return {1, ones};
  }
  const unsigned bits = 2 * few >= count ? 4 : 8;
  const auto escape = static_cast<Unit<W>>((1u << bits) - 1);
  const unsigned per_byte = 8 / bits;
  std::size_t escaped = 0;
  for (std::size_t i = 0; i < count;) {
    unsigned packed = 0;
    for (unsigned slot = 0; slot < per_byte && i < count; ++slot, ++i) {
      const auto value = static_cast<Unit<W>>(
          told<W>(load<Unit<W>>(old_bits + i * W), load<Unit<W>>(new_bits + i * W), is_step) - 1);
      const bool is_escaped = value >= escape;
      packed |= static_cast<unsigned>(is_escaped ? escape : value) << (bits * slot);
      // Written over by the next one unless it counts, so that no branch depends on the data.
      store(excess + escaped * W, static_cast<Unit<W>>(value - escape));
      escaped += is_escaped;
    }
    *symbols++ = static_cast<unsigned char>(packed);
  }
  return {bits, escaped};
}

// Reads the symbols as values without an excess and returns how many of them are the escape.
template <std::size_t W, unsigned kBits>
std::size_t read_plain(const unsigned char* old_bits, std::size_t count, bool is_step, const unsigned char* symbols,
                       unsigned char* new_bits) noexcept {
  constexpr unsigned kEscape = (1u << kBits) - 1;
  constexpr std::size_t kPerByte = 8 / kBits;
  std::size_t escaped = 0;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    unsigned char told_here[kBlock];
    const std::size_t size = std::min(kBlock, count - begin);
    unsigned escaped_here = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const unsigned symbol = symbols[(begin + i) / kPerByte] >> (i % kPerByte * kBits) & kEscape;
      escaped_here += symbol == kEscape;
      told_here[i] = static_cast<unsigned char>(symbol);
    }
    for (std::size_t i = 0; i < size; ++i) {
      const auto value = static_cast<Unit<W>>(told_here[i] + 1u);
      store(new_bits + (begin + i) * W, untold<W>(load<Unit<W>>(old_bits + (begin + i) * W), value, is_step));
    }
    escaped += escaped_here;
  }
  return escaped;
}

template <std::size_t W, unsigned kBits>
bool read_width(const unsigned char* old_bits, std::size_t count, bool is_step, const unsigned char* symbols,
                const unsigned char* excess, std::size_t escaped, unsigned char* new_bits) noexcept {
  constexpr unsigned kEscape = (1u << kBits) - 1;
  constexpr std::size_t kPerByte = 8 / kBits;
  if (read_plain<W, kBits>(old_bits, count, is_step, symbols, new_bits) != escaped) return false;
  if (count % kPerByte && symbols[count / kPerByte] >> (count % kPerByte * kBits)) return false;
  constexpr auto kLargest = static_cast<Unit<W>>(~Unit<W>{0});
  if (escaped && kLargest <= kEscape) return false;  // then a symbol tells every value of a unit
  bool has_excess = false;
  for (std::size_t i = 0; i < escaped; ++i) {
    const auto more = load<Unit<W>>(excess + i * W);
    if (more > static_cast<Unit<W>>(kLargest - 1 - kEscape)) return false;
    has_excess |= more != 0;
  }
  for (std::size_t i = 0, taken = 0; has_excess && i < count; ++i) {
    if ((symbols[i / kPerByte] >> (i % kPerByte * kBits) & kEscape) != kEscape) continue;
    const auto value = static_cast<Unit<W>>(kEscape + 1 + load<Unit<W>>(excess + taken++ * W));
    store(new_bits + i * W, untold<W>(load<Unit<W>>(old_bits + i * W), value, is_step));
  }
  return true;
}

}  // namespace

SymbolCounts write_symbols(const unsigned char* old_bits, const unsigned char* new_bits, std::size_t count,
                           unsigned unit_bytes, bool is_step, unsigned char* symbols, unsigned char* excess) noexcept {
  return with_width(unit_bytes, [&](auto width) {
    return write_width<width()>(old_bits, new_bits, count, is_step, symbols, excess);
  });
}

bool read_symbols(const unsigned char* old_bits, std::size_t count, unsigned unit_bytes, bool is_step,
                  const unsigned char* symbols, unsigned bits, const unsigned char* excess, std::size_t escaped,
                  unsigned char* new_bits) noexcept {
  return with_width(unit_bytes, [&](auto width) {
    constexpr std::size_t W = width();
    switch (bits) {
      case 1: return read_width<W, 1>(old_bits, count, is_step, symbols, excess, escaped, new_bits);
      case 2: return read_width<W, 2>(old_bits, count, is_step, symbols, excess, escaped, new_bits);
      case 4: return read_width<W, 4>(old_bits, count, is_step, symbols, excess, escaped, new_bits);
      default: return read_width<W, 8>(old_bits, count, is_step, symbols, excess, escaped, new_bits);
    }
  });
}

}  // namespace syncline
