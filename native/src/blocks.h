// The vector kernels, written once over an instruction set `V` and compiled once in each of its files.
//
// V offers: `Word`, a vector of `kLanes` 64-bit words, with load, zero, add, mul32 (low halves), mul64 (by one
// number), sum, `digit<W>` (the i-th of a word, in its low half) and `mul_key<W>` (the square of a digit of W bytes by
// a 32-bit key); `differing<W>`, the mask of which of 64 units of W bytes differ; and `emit<W>`, which writes
// the changes that a mask names.
#pragma once

#include <bit>

#include "table.h"

namespace syncline {
namespace {

template <std::size_t W>
struct UnitOf;
template <>
struct UnitOf<1> {
  using type = std::uint8_t;
};
template <>
struct UnitOf<2> {
  using type = std::uint16_t;
};
template <>
struct UnitOf<4> {
  using type = std::uint32_t;
};
template <>
struct UnitOf<8> {
  using type = std::uint64_t;
};
template <std::size_t W>
using Unit = typename UnitOf<W>::type;

constexpr std::size_t kGroup = 64;

// One bit after the other: best when few are set, and the only way that fits exactly.
template <std::size_t W>
inline void emit_bits(const DiffTask& task, std::size_t at, std::uint64_t mask, std::size_t found) noexcept {
  for (; mask != 0; mask &= mask - 1, ++found) {
    const std::size_t place = at + static_cast<std::size_t>(std::countr_zero(mask));
    const auto fresh = load<Unit<W>>(task.new_bits + place * W);
    task.offsets[found] = static_cast<std::uint32_t>(place);
    store(task.changed_old + found * W, load<Unit<W>>(task.old_bits + place * W));
    store(task.changed_new + found * W, fresh);
    if (task.refresh) store(task.old_bits + place * W, fresh);
  }
}

template <std::size_t W>
inline std::uint64_t differing_tail(const DiffTask& task, std::size_t at) noexcept {
  std::uint64_t mask = 0;
  for (std::size_t i = at; i < task.end; ++i) {
    const bool differs = load<Unit<W>>(task.old_bits + i * W) != load<Unit<W>>(task.new_bits + i * W);
    mask |= std::uint64_t{differs} << (i - at);
  }
  return mask;
}

template <typename V, std::size_t W>
Progress diff_width(const DiffTask& task) noexcept {
  std::size_t at = task.begin;
  std::size_t found = 0;
  for (; at < task.end; at += kGroup) {
    const bool is_whole = task.end - at >= kGroup;
    const std::uint64_t mask = is_whole ? V::template differing<W>(task.old_bits + at * W, task.new_bits + at * W)
                                        : differing_tail<W>(task, at);
    if (mask == 0) continue;
    const auto count = static_cast<std::size_t>(std::popcount(mask));
    if (count > task.capacity - found) return {at, found};
    if (is_whole && task.capacity - found >= kGroup) {
      V::template emit<W>(task, at, mask, found);
    } else {
      emit_bits<W>(task, at, mask, found);
    }
    found += count;
  }
  return {task.end, found};
}

template <typename V>
Progress diff_all(const DiffTask& task, unsigned unit_bytes) noexcept {
  switch (unit_bytes) {
    case 1:
      return diff_width<V, 1>(task);
    case 2:
      return diff_width<V, 2>(task);
    case 4:
      return diff_width<V, 4>(task);
    default:
      return diff_width<V, 8>(task);
  }
}

constexpr std::size_t kRowsAtOnce = 2;

// A 64-bit word holds 8 / W digits. Each is brought to the low half and squared: 16 or 32 bits, or 64 where W
// is 4. The sums wrap, so their order is free. Rows share each load of a key; row keys are applied once a row.
template <typename V, std::size_t W, std::size_t kRows>
inline void add_rows(const unsigned char* digits, std::uint64_t row, Lanes seeds, typename V::Word* total_a,
                     typename V::Word* total_b) noexcept {
  constexpr std::size_t kPerWord = 8 / W;
  constexpr std::size_t kWords = kRowDigits / kPerWord;
  const std::uint64_t* key_a = keys.word[std::countr_zero(W)][0];
  const std::uint64_t* key_b = keys.word[std::countr_zero(W)][1];
  typename V::Word sum_a[kRows];
  typename V::Word sum_b[kRows];
  for (std::size_t r = 0; r < kRows; ++r) sum_a[r] = sum_b[r] = V::zero();
  for (std::size_t word = 0; word < kWords; word += V::kLanes) {
    typename V::Word data[kRows];
    for (std::size_t r = 0; r < kRows; ++r) {
      const unsigned char* at = digits + r * kRowDigits * W + word * 8;
      data[r] = V::load(at);
    }
    for (std::size_t i = 0; i < kPerWord; ++i) {
      const auto a = V::load(key_a + i * kWords + word);
      const auto b = V::load(key_b + i * kWords + word);
      for (std::size_t r = 0; r < kRows; ++r) {
        const auto digit = V::template digit<W>(data[r], i);
        const auto square = V::mul32(digit, digit);
        sum_a[r] = V::add(sum_a[r], V::template mul_key<W>(square, a));
        sum_b[r] = V::add(sum_b[r], V::template mul_key<W>(square, b));
      }
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    *total_a = V::add(*total_a, V::mul64(sum_a[r], row_key(seeds.a, row + r)));
    *total_b = V::add(*total_b, V::mul64(sum_b[r], row_key(seeds.b, row + r)));
  }
}

template <typename V, std::size_t W>
Lanes rows_width(const unsigned char* digits, std::size_t row_count, std::uint64_t row, Lanes seeds) noexcept {
  auto total_a = V::zero();
  auto total_b = V::zero();
  std::size_t r = 0;
  for (; r + kRowsAtOnce <= row_count; r += kRowsAtOnce) {
    add_rows<V, W, kRowsAtOnce>(digits + r * kRowDigits * W, row + r, seeds, &total_a, &total_b);
  }
  for (; r < row_count; ++r) {
    add_rows<V, W, 1>(digits + r * kRowDigits * W, row + r, seeds, &total_a, &total_b);
  }
  return {V::sum(total_a), V::sum(total_b)};
}

template <typename V>
Lanes rows_all(const unsigned char* digits, std::size_t row_count, unsigned digit_bytes, std::uint64_t row,
               Lanes seeds) noexcept {
  switch (digit_bytes) {
    case 1:
      return rows_width<V, 1>(digits, row_count, row, seeds);
    case 2:
      return rows_width<V, 2>(digits, row_count, row, seeds);
    default:
      return rows_width<V, 4>(digits, row_count, row, seeds);
  }
}

template <typename V>
std::uint64_t read_all(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept {
  constexpr std::size_t kStep = 4 * V::kLanes * 8;
  typename V::Word sums[8];
  for (auto& sum : sums) sum = V::zero();
  std::size_t at = 0;
  for (; at + kStep <= size; at += kStep) {
    for (std::size_t i = 0; i < 4; ++i) {
      sums[i] = V::add(sums[i], V::load(first + at + i * V::kLanes * 8));
      sums[4 + i] = V::add(sums[4 + i], V::load(second + at + i * V::kLanes * 8));
    }
  }
  std::uint64_t total = 0;
  for (const auto& sum : sums) total += V::sum(sum);
  for (; at < size; at += 8) total += load<std::uint64_t>(first + at) + load<std::uint64_t>(second + at);
  return total;
}

template <typename V>
constexpr Table table_of() {
  return {diff_all<V>, rows_all<V>, read_all<V>};
}

}  // namespace
}  // namespace syncline
