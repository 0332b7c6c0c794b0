// The unary and the field bits of `tight`, read and written class by class.
#include <algorithm>
#include <bit>
#include <cstring>

#include "tight.h"

namespace syncline {
namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

template <typename Word>
inline Word load(const unsigned char* at) noexcept {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

template <typename Word>
inline void store(unsigned char* at, Word word) noexcept {
  std::memcpy(at, &word, sizeof word);
}

inline u64 low_mask(unsigned bits) noexcept {
  return (u64{1} << bits) - 1;
}  // bits below 64

// Both readers answer zeros beyond the end and remember only where they are; the end is checked once.
class Bits {
 public:
  Bits(const unsigned char* data, std::size_t size) noexcept : data_(data), size_(size) {}

  // The 64 bits from byte `at` on.
  u64 word(std::size_t at) const noexcept {
    if (at + 8 <= size_) [[likely]]
      return load<u64>(data_ + at);
    u64 out = 0;
    if (at < size_) std::memcpy(&out, data_ + at, size_ - at);
    return out;
  }
  std::size_t size() const noexcept { return size_; }

 private:
  const unsigned char* data_;
  std::size_t size_;
};

class UnaryReader {
 public:
  UnaryReader(const unsigned char* data, std::size_t size) noexcept : bits_(data, size) {}

  // The number of zeros before the next one; false if there is none.
  bool next(u64* zeros) noexcept {
    u64 found = 0;
    u64 word = bits_.word(at_ >> 3) >> (at_ & 7);
    while (word == 0) [[unlikely]] {
        const u64 skipped = 64 - (at_ & 7);
        at_ += skipped;
        found += skipped;
        if (at_ >> 3 >= bits_.size()) return false;
        word = bits_.word(at_ >> 3);
      }
    const auto here = static_cast<u64>(std::countr_zero(word));
    at_ += here + 1;
    *zeros = found + here;
    return true;
  }
  // Whether the bits end with the byte of the last one read, and hold no more ones.
  bool is_at_end() const noexcept {
    return (at_ + 7) >> 3 == bits_.size() && ((at_ & 7) == 0 || bits_.word(at_ >> 3) >> (at_ & 7) == 0);
  }

 private:
  Bits bits_;
  u64 at_ = 0;
};

class FieldReader {
 public:
  FieldReader(const unsigned char* data, std::size_t size) noexcept : bits_(data, size) {}

  u64 next(unsigned width) noexcept {
    const unsigned shift = at_ & 7;
    u64 word = bits_.word(at_ >> 3) >> shift;
    if (shift + width > 64) word |= bits_.word((at_ >> 3) + 8) << (64 - shift);
    at_ += width;
    return word & low_mask(width);
  }
  u64 bits_read() const noexcept { return at_; }
  bool is_at_end() const noexcept {
    return (at_ + 7) >> 3 == bits_.size() && ((at_ & 7) == 0 || bits_.word(at_ >> 3) >> (at_ & 7) == 0);
  }

 private:
  Bits bits_;
  u64 at_ = 0;
};

struct Reader {
  UnaryReader unary;
  FieldReader fields;
};

TightStatus read_marks(Reader& in, std::size_t count, unsigned bits, u64 limit, u32* marks) noexcept {
  u64 next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    u64 quotient;
    if (!in.unary.next(&quotient)) return TightStatus::wrong_unary;
    next += (quotient << bits | in.fields.next(bits)) + 1;  // below 2^59: quotients are below 2^35
    if (next > limit) return TightStatus::beyond_limit;
    marks[i] = static_cast<u32>(next - 1);
  }
  return TightStatus::ok;
}

// Leaves the number of ulps in `steps`: first 1 or 2 by the marks, then what the excesses say.
template <typename Unit>
TightStatus read_ulps(Reader& in, const ClassEntry& entry, unsigned char* steps) noexcept {
  constexpr unsigned kBits = 8 * sizeof(Unit);
  const Unit unmarked = entry.small_marked != 0 ? 2 : 1;
  for (std::size_t i = 0; i < entry.changes; ++i) store<Unit>(steps + i * sizeof(Unit), unmarked);
  u64 next = 0;
  for (std::size_t i = 0; i < entry.large_marks; ++i) {
    u64 quotient;
    if (!in.unary.next(&quotient)) return TightStatus::wrong_unary;
    next += (quotient << entry.run_bits | in.fields.next(entry.run_bits)) + 1;
    if (next > entry.changes) return TightStatus::beyond_limit;
    store<Unit>(steps + (next - 1) * sizeof(Unit), static_cast<Unit>(3 - unmarked));
  }
  if (entry.large == 0) return TightStatus::ok;
  for (std::size_t i = 0; i < entry.changes; ++i) {
    if (load<Unit>(steps + i * sizeof(Unit)) == 1) continue;
    u64 top;
    if (!in.unary.next(&top)) return TightStatus::wrong_unary;
    top += entry.excess_bits;
    if (top >= kBits) return TightStatus::too_large;
    const u64 excess = (u64{1} << top) + in.fields.next(static_cast<unsigned>(top)) - (u64{1} << entry.excess_bits);
    if (excess > (u64{1} << (kBits - 1)) - 2) return TightStatus::too_large;
    store<Unit>(steps + i * sizeof(Unit), static_cast<Unit>(excess + 2));
  }
  return TightStatus::ok;
}

template <typename Unit>
TightStatus read_signs(Reader& in, std::size_t count, unsigned char* steps) noexcept {
  bool fits = true;
  for (std::size_t i = 0; i < count;) {
    const auto now = static_cast<unsigned>(std::min<std::size_t>(count - i, 32));
    u64 signs = in.fields.next(now);
    for (unsigned j = 0; j < now; ++j, ++i, signs >>= 1) {
      const auto ulps = load<Unit>(steps + i * sizeof(Unit));
      const auto zigzag = static_cast<Unit>(ulps + ulps - static_cast<Unit>(signs & 1));
      fits &= zigzag != 0;
      store<Unit>(steps + i * sizeof(Unit), zigzag);
    }
  }
  return fits ? TightStatus::ok : TightStatus::too_large;
}

template <typename Unit>
TightOutcome read_all(Reader& in, const ClassEntry* entries, unsigned classes, u64 limit, u32* marks,
                      unsigned char* steps) noexcept {
  for (unsigned c = 0; c < classes; ++c) {
    const ClassEntry& entry = entries[c];
    auto status = read_marks(in, entry.marks, entry.gap_bits, limit, marks);
    if (status != TightStatus::ok) return {status, c, limit};
    status = read_ulps<Unit>(in, entry, steps);
    if (status != TightStatus::ok) return {status, c, entry.changes};
    status = read_signs<Unit>(in, entry.changes, steps);
    if (status != TightStatus::ok) return {status, c, 0};
    marks += entry.marks;
    steps += entry.changes * sizeof(Unit);
  }
  if (!in.unary.is_at_end()) return {TightStatus::wrong_unary, 0, 0};
  if (!in.fields.is_at_end()) return {TightStatus::wrong_fields, 0, in.fields.bits_read()};
  return {TightStatus::ok, 0, 0};
}

class UnaryWriter {
 public:
  explicit UnaryWriter(unsigned char* out) noexcept : out_(out) {}
  void put(u64 zeros) noexcept {
    at_ += zeros;
    out_[at_ >> 3] = static_cast<unsigned char>(out_[at_ >> 3] | 1u << (at_ & 7));
    ++at_;
  }
  std::size_t size() const noexcept { return (at_ + 7) >> 3; }

 private:
  unsigned char* out_;
  u64 at_ = 0;
};

class FieldWriter {
 public:
  explicit FieldWriter(unsigned char* out) noexcept : out_(out) {}
  void put(u64 value, unsigned width) noexcept {  // width below 64
    word_ |= value << used_;
    used_ += width;
    if (used_ < 64) return;
    store(out_ + size_, word_);
    size_ += 8;
    used_ -= 64;
    word_ = used_ == 0 ? 0 : value >> (width - used_);
  }
  std::size_t finish() noexcept {
    const std::size_t rest = (used_ + 7) / 8;
    std::memcpy(out_ + size_, &word_, rest);
    return size_ + rest;
  }

 private:
  unsigned char* out_;
  std::size_t size_ = 0;
  u64 word_ = 0;
  unsigned used_ = 0;
};

struct Writer {
  UnaryWriter unary;
  FieldWriter fields;

  void gap(u64 gap, unsigned bits) noexcept {
    unary.put(gap >> bits);
    fields.put(gap & low_mask(bits), bits);
  }
};

template <typename Unit>
void write_class(Writer& out, const ClassEntry& entry, const u32* marks, const unsigned char* steps) noexcept {
  u64 next = 0;
  for (std::size_t i = 0; i < entry.marks; ++i) {
    out.gap(marks[i] - next, entry.gap_bits);
    next = u64{marks[i]} + 1;
  }
  const auto step = [&](std::size_t i) { return load<Unit>(steps + i * sizeof(Unit)); };
  if (entry.large != 0) {
    const bool marked = entry.small_marked == 0;
    next = 0;
    for (std::size_t i = 0; i < entry.changes; ++i) {
      if ((step(i) > 2) != marked) continue;
      out.gap(i - next, entry.run_bits);
      next = i + 1;
    }
    for (std::size_t i = 0; i < entry.changes; ++i) {
      const u64 zigzag = step(i);
      if (zigzag <= 2) continue;
      const u64 sum = (zigzag >> 1) + (zigzag & 1) - 2 + (u64{1} << entry.excess_bits);
      const auto top = static_cast<unsigned>(std::bit_width(sum)) - 1;
      out.unary.put(top - entry.excess_bits);
      out.fields.put(sum & low_mask(top), top);
    }
  }
  for (std::size_t i = 0; i < entry.changes;) {
    const std::size_t now = std::min<std::size_t>(entry.changes - i, 32);
    u64 signs = 0;
    for (std::size_t j = 0; j < now; ++j) signs |= u64{step(i + j) & 1u} << j;
    out.fields.put(signs, static_cast<unsigned>(now));
    i += now;
  }
}

template <typename Unit>
void write_all(Writer& out, const ClassEntry* entries, unsigned classes, const u32* marks,
               const unsigned char* steps) noexcept {
  for (unsigned c = 0; c < classes; ++c) {
    write_class<Unit>(out, entries[c], marks, steps);
    marks += entries[c].marks;
    steps += entries[c].changes * sizeof(Unit);
  }
}

}  // namespace

void write_lists(const ClassEntry* entries, unsigned classes, const u32* marks, const unsigned char* zigzag,
                 unsigned unit_bytes, unsigned char* unary, unsigned char* fields, std::size_t* unary_size,
                 std::size_t* fields_size) noexcept {
  Writer out{UnaryWriter(unary), FieldWriter(fields)};
  switch (unit_bytes) {
    case 1:
      write_all<u8>(out, entries, classes, marks, zigzag);
      break;
    case 2:
      write_all<std::uint16_t>(out, entries, classes, marks, zigzag);
      break;
    case 4:
      write_all<u32>(out, entries, classes, marks, zigzag);
      break;
    default:
      write_all<u64>(out, entries, classes, marks, zigzag);
  }
  *unary_size = out.unary.size();
  *fields_size = out.fields.finish();
}

TightOutcome read_lists(const ClassEntry* entries, unsigned classes, const unsigned char* unary, std::size_t unary_size,
                        const unsigned char* fields, std::size_t fields_size, u64 limit, unsigned unit_bytes,
                        u32* marks, unsigned char* zigzag) noexcept {
  Reader in{UnaryReader(unary, unary_size), FieldReader(fields, fields_size)};
  switch (unit_bytes) {
    case 1:
      return read_all<u8>(in, entries, classes, limit, marks, zigzag);
    case 2:
      return read_all<std::uint16_t>(in, entries, classes, limit, marks, zigzag);
    case 4:
      return read_all<u32>(in, entries, classes, limit, marks, zigzag);
    default:
      return read_all<u64>(in, entries, classes, limit, marks, zigzag);
  }
}

}  // namespace syncline
