// Kernels over lists of changes: O(changes), the same on every instruction set.
#include "table.h"

namespace syncline {
namespace {

constexpr std::uint64_t kEscape = 255;

template <typename Unit>
void scatter_units(unsigned char* target, const std::uint32_t* offsets, const unsigned char* bits,
                   std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    store(target + std::size_t{offsets[i]} * sizeof(Unit), load<Unit>(bits + i * sizeof(Unit)));
  }
}

template <typename Unit>
void gather_units(const unsigned char* source, const std::uint32_t* offsets, unsigned char* bits,
                  std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    store(bits + i * sizeof(Unit), load<Unit>(source + std::size_t{offsets[i]} * sizeof(Unit)));
  }
}

Outcome check_range(const std::uint32_t* offsets, std::size_t count, std::size_t limit) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    if (offsets[i] >= limit) return {Status::out_of_range, i};
  }
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
  const Outcome checked = check_range(offsets, count, target_count);
  if (checked.status != Status::ok) return checked;
  switch (unit_bytes) {
    case 1:
      scatter_units<std::uint8_t>(target, offsets, bits, count);
      break;
    case 2:
      scatter_units<std::uint16_t>(target, offsets, bits, count);
      break;
    case 4:
      scatter_units<std::uint32_t>(target, offsets, bits, count);
      break;
    default:
      scatter_units<std::uint64_t>(target, offsets, bits, count);
  }
  return checked;
}

Outcome gather(const unsigned char* source, std::size_t source_count, const std::uint32_t* offsets,
               unsigned char* bits, std::size_t count, unsigned unit_bytes) noexcept {
  const Outcome checked = check_range(offsets, count, source_count);
  if (checked.status != Status::ok) return checked;
  switch (unit_bytes) {
    case 1:
      gather_units<std::uint8_t>(source, offsets, bits, count);
      break;
    case 2:
      gather_units<std::uint16_t>(source, offsets, bits, count);
      break;
    case 4:
      gather_units<std::uint32_t>(source, offsets, bits, count);
      break;
    default:
      gather_units<std::uint64_t>(source, offsets, bits, count);
  }
  return checked;
}

Outcome encode_gaps(const std::uint32_t* offsets, std::size_t count, unsigned low_bytes, unsigned char* low,
                    unsigned char* high, std::size_t* high_size) noexcept {
  std::size_t used = 0;
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (offsets[i] < next) return {Status::not_ascending, i};
    std::uint64_t gap = offsets[i] - next;
    next = std::uint64_t{offsets[i]} + 1;
    for (unsigned byte = 0; byte < low_bytes; ++byte) {
      low[byte * count + i] = static_cast<unsigned char>(gap);
      gap >>= 8;
    }
    for (; gap >= kEscape; gap -= kEscape) high[used++] = kEscape;
    high[used++] = static_cast<unsigned char>(gap);
  }
  *high_size = used;
  return {Status::ok, count};
}

Outcome decode_gaps(const unsigned char* low, unsigned low_bytes, const unsigned char* high,
                    std::size_t high_size, std::uint64_t limit, std::uint32_t* offsets,
                    std::size_t count) noexcept {
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
