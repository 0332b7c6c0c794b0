// The reference for the vector kernels: one unit after the other, compiled without auto-vectorisation.
#include "planes.h"
#include "table.h"

namespace syncline {
namespace {

template <std::size_t W>
Progress diff_width(const DiffTask& task) noexcept {
  std::size_t found = 0;
  for (std::size_t at = task.begin; at < task.end; ++at) {
    const auto before = load<Unit<W>>(task.old_bits + at * W);
    const auto fresh = load<Unit<W>>(task.new_bits + at * W);
    if (before == fresh) continue;
    if (found == task.capacity) return {at, found};
    task.offsets[found] = static_cast<std::uint32_t>(at);
    store(task.changed_old + found * W, before);
    store(task.changed_new + found * W, fresh);
    if (task.refresh) store(task.old_bits + at * W, fresh);
    ++found;
  }
  return {task.end, found};
}

Progress diff_all(const DiffTask& task, unsigned unit_bytes) noexcept {
  return with_width(unit_bytes, [&](auto width) { return diff_width<width()>(task); });
}

Lanes rows_all(const unsigned char* digits, std::size_t row_count, unsigned digit_bytes, std::uint64_t row,
               Lanes seeds) noexcept {
  Lanes total{0, 0};
  for (std::size_t r = 0; r < row_count; ++r) {
    const auto part =
        fingerprint_part(digits + r * kRowDigits * digit_bytes, kRowDigits, digit_bytes, 0, row + r, seeds);
    total = {total.a + part.a, total.b + part.b};
  }
  return total;
}

std::uint64_t read_all(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept {
  std::uint64_t total = 0;
  for (std::size_t at = 0; at < size; at += 8) {
    total += load<std::uint64_t>(first + at) + load<std::uint64_t>(second + at);
  }
  return total;
}

}  // namespace

Lanes fingerprint_part(const unsigned char* digits, std::size_t count, unsigned digit_bytes, std::size_t column,
                       std::uint64_t row, Lanes seeds) noexcept {
  return with_width(digit_bytes, [&](auto width) {
    Lanes inner{0, 0};
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t digit = load<Unit<width()>>(digits + i * width());
      inner.a += keys.column[0][column + i] * (digit * digit);
      inner.b += keys.column[1][column + i] * (digit * digit);
    }
    return Lanes{inner.a * row_key(seeds.a, row), inner.b * row_key(seeds.b, row)};
  });
}

constinit const Table scalar_table = {diff_all, rows_all, read_all, split_all, join_all};

}  // namespace syncline
