// Kernels over lists of changes: O(changes), the same on every instruction set.
#include "table.h"

namespace syncline {
namespace {

constexpr std::uint64_t kEscape = 255;

// How many changes ahead `gather` fetches memory; writes gain nothing by it.
constexpr std::size_t kAhead = 64;

Outcome check_range(const std::uint32_t* offsets, std::size_t count, std::size_t limit) noexcept {
  std::uint32_t highest = 0;
  for (std::size_t i = 0; i < count; ++i) highest = offsets[i] > highest ? offsets[i] : highest;
  if (count == 0 || highest < limit) return {Status::ok, count};
  std::size_t first = 0;
  while (offsets[first] < limit) ++first;
  return {Status::out_of_range, first};
}

constexpr std::size_t kBlock = 64;  // changes that are compared without a branch between them

// One gap in bytes; up to 509 without a branch, since whether it has an escape cannot be foretold.
unsigned char* write_gap(std::uint64_t gap, unsigned char* high) noexcept {
  for (; gap >= 2 * kEscape; gap -= kEscape) *high++ = kEscape;
  const bool is_escaped = gap >= kEscape;
  *high = kEscape;
  high += is_escaped;
  *high++ = static_cast<unsigned char>(gap - (is_escaped ? kEscape : 0));
  return high;
}

// Gaps without low bytes. Whether a byte is an escape cannot be foretold, so nothing branches on it: an offset is
// written again and again until its gap has ended.
Outcome add_gaps(const unsigned char* gaps, std::size_t size, std::uint64_t limit, std::uint32_t* offsets,
                 std::size_t count) noexcept {
  std::uint64_t next = 0;
  std::size_t at = 0, found = 0;
  while (found < count && at < size) {
    // A byte ends one gap at most, so there is room for what these end.
    const std::size_t stop = size - at < count - found ? size : at + count - found;
    for (; at < stop; ++at) {
      next += gaps[at];
      offsets[found] = static_cast<std::uint32_t>(next);
      const bool ends = gaps[at] != kEscape;
      next += ends;
      found += ends;
    }
  }
  // Offsets rise, so if the last is below the limit all are.
  if (next > limit) {
    next = 0;
    for (std::size_t i = 0, index = 0; i < size; next += gaps[i] != kEscape, index += gaps[i++] != kEscape) {
      next += gaps[i];
      if (next >= limit && gaps[i] != kEscape) return {Status::out_of_range, index};
    }
  }
  if (found < count) return {Status::cut_short, found};
  if (at != size) return {Status::wrong_count, at};
  return {Status::ok, count};
}

}  // namespace

void xor_bytes(const unsigned char* a, const unsigned char* b, unsigned char* out, std::size_t size) noexcept {
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8) store(out + at, load<std::uint64_t>(a + at) ^ load<std::uint64_t>(b + at));
  for (; at < size; ++at) out[at] = static_cast<unsigned char>(a[at] ^ b[at]);
}

Outcome scatter(unsigned char* target, std::size_t target_count, const std::uint32_t* offsets,
                const unsigned char* bits, std::size_t count, unsigned unit_bytes) noexcept {
  const Outcome outcome = check_range(offsets, count, target_count);
  if (outcome.status != Status::ok) return outcome;
  return with_width(unit_bytes, [&](auto width) {
    constexpr std::size_t W = width();
    for (std::size_t i = 0; i < count; ++i) store(target + offsets[i] * W, load<Unit<W>>(bits + i * W));
    return outcome;
  });
}

Outcome gather(const unsigned char* source, std::size_t source_count, const std::uint32_t* offsets, unsigned char* bits,
               std::size_t count, unsigned unit_bytes) noexcept {
  const Outcome outcome = check_range(offsets, count, source_count);
  if (outcome.status != Status::ok) return outcome;
  return with_width(unit_bytes, [&](auto width) {
    constexpr std::size_t W = width();
    for (std::size_t i = 0; i < count; ++i) {
      if (count - i > kAhead) __builtin_prefetch(source + offsets[i + kAhead] * W);
      store(bits + i * W, load<Unit<W>>(source + offsets[i] * W));
    }
    return outcome;
  });
}

Outcome compare(const unsigned char* source, std::size_t source_count, const std::uint32_t* offsets,
                const unsigned char* bits, std::size_t count, unsigned unit_bytes) noexcept {
  const Outcome outcome = check_range(offsets, count, source_count);
  if (outcome.status != Status::ok) return outcome;
  return with_width(unit_bytes, [&](auto width) {
    constexpr std::size_t W = width();
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
      const std::size_t end = count - begin < kBlock ? count : begin + kBlock;
      bool differs = false;
      for (std::size_t i = begin; i < end; ++i) {
        if (count - i > kAhead) __builtin_prefetch(source + offsets[i + kAhead] * W);
        differs |= load<Unit<W>>(bits + i * W) != load<Unit<W>>(source + offsets[i] * W);
      }
      for (std::size_t i = begin; differs && i < end; ++i) {
        if (load<Unit<W>>(bits + i * W) != load<Unit<W>>(source + offsets[i] * W)) return Outcome{Status::differs, i};
      }
    }
    return outcome;
  });
}

Outcome check_ascending(const std::uint32_t* offsets, std::size_t count, std::uint64_t limit) noexcept {
  bool falls = false;
  for (std::size_t i = 1; i < count; ++i) falls |= offsets[i] <= offsets[i - 1];
  if (!falls && (count == 0 || offsets[count - 1] < limit)) return {Status::ok, count};
  for (std::size_t i = 0; i < count; ++i) {
    if (offsets[i] >= limit) return {Status::out_of_range, i};
  }
  std::size_t first = 1;
  while (offsets[first] > offsets[first - 1]) ++first;
  return {Status::not_ascending, first};
}

Lanes fingerprint_change(const std::uint32_t* offsets, const unsigned char* old_bits, const unsigned char* new_bits,
                         std::size_t count, unsigned unit_bytes, std::uint64_t start, Lanes seeds) noexcept {
  return with_width(unit_bytes, [&](auto width) {
    constexpr std::size_t kDigitBytes = width() == 8 ? 4 : width();
    constexpr std::size_t kDigits = width() / kDigitBytes;
    Lanes total{0, 0};
    Lanes inner{0, 0};
    std::uint64_t row = 0;
    // Neighbours share a row, so that row keys are made about once a row.
    const auto finish_row = [&] {
      total.a += inner.a * row_key(seeds.a, row);
      total.b += inner.b * row_key(seeds.b, row);
      inner = {0, 0};
    };
    for (std::size_t i = 0; i < count * kDigits; ++i) {
      const std::uint64_t digit = (start + offsets[i / kDigits]) * kDigits + i % kDigits;
      if (digit / kRowDigits != row) {
        finish_row();
        row = digit / kRowDigits;
      }
      const std::uint64_t before = load<Unit<kDigitBytes>>(old_bits + i * kDigitBytes);
      const std::uint64_t after = load<Unit<kDigitBytes>>(new_bits + i * kDigitBytes);
      const std::uint64_t rise = after * after - before * before;
      inner.a += keys.column[0][digit % kRowDigits] * rise;
      inner.b += keys.column[1][digit % kRowDigits] * rise;
    }
    finish_row();
    return total;
  });
}

Outcome encode_gaps(const std::uint32_t* offsets, std::size_t count, unsigned low_bytes, unsigned char* low,
                    unsigned char* high, std::size_t* high_size) noexcept {
  // None is beyond the last, so that gaps never need more room than the last one tells.
  const Outcome outcome = check_ascending(offsets, count, std::uint64_t{1} << 32);
  if (outcome.status != Status::ok) return outcome;
  unsigned char* const begin = high;
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t gap = offsets[i] - next;
    next = std::uint64_t{offsets[i]} + 1;
    for (unsigned byte = 0; byte < low_bytes; ++byte) {
      low[byte * count + i] = static_cast<unsigned char>(gap);
      gap >>= 8;
    }
    high = write_gap(gap, high);
  }
  *high_size = static_cast<std::size_t>(high - begin);
  return outcome;
}

Outcome decode_gaps(const unsigned char* low, unsigned low_bytes, const unsigned char* high, std::size_t high_size,
                    std::uint64_t limit, std::uint32_t* offsets, std::size_t count) noexcept {
  if (low_bytes == 0) return add_gaps(high, high_size, limit, offsets, count);
  std::size_t at = 0;
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t gap = 0;
    for (; at < high_size && high[at] == kEscape; ++at) gap += kEscape;
    if (at == high_size) return {Status::cut_short, i};
    gap += high[at++];
    for (unsigned byte = low_bytes; byte-- > 0;) gap = gap << 8 | low[byte * count + i];
    next += gap;
    // A gap is below 2^32 * 2^16, so sums of them cannot wrap before they are noticed here.
    if (next >= limit) return {Status::out_of_range, i};
    offsets[i] = static_cast<std::uint32_t>(next++);
  }
  if (at != high_size) return {Status::wrong_count, at};
  return {Status::ok, count};
}

}  // namespace syncline
