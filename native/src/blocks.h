// The vector kernels, written once over an instruction set `V` and compiled once in each of its files.
//
// V offers vectors (`Word`) of `kLanes` 64-bit words with load, load_once, zero, add, mul32 (of low halves), mul64 (by
// one number) and sum; `digit`, the i-th of a word in its low half; `add_product` of a digit's square and a 32-bit key;
// `differing`, which of 64 units differ; `emit`, which writes the changes that such a mask names and may write up to 64
// places beyond them; and `kGroupsAtOnce`, after how many of these it looks whether any differ.
#pragma once

#include <bit>

#include "planes.h"
#include "table.h"

namespace syncline {
namespace {

constexpr std::size_t kGroup = 64;

// Every round writes four changes, wanted or not, so that the usual small counts cost no wrong guess of a
// branch. What lies beyond the last change is overwritten by the next group, or is not looked at.
template <std::size_t W>
[[maybe_unused]] inline void emit_by_bits(const DiffTask& task, std::size_t at, std::uint64_t mask,
                                          std::size_t found) noexcept {
  do {
    for (std::size_t i = 0; i < 4; ++i, ++found, mask &= mask - 1) {
      const std::size_t place = at + static_cast<std::size_t>(std::countr_zero(mask)) % kGroup;
      const auto fresh = load<Unit<W>>(task.new_bits + place * W);
      task.offsets[found] = static_cast<std::uint32_t>(place);
      store(task.changed_old + found * W, load<Unit<W>>(task.old_bits + place * W));
      store(task.changed_new + found * W, fresh);
      if (task.refresh) store(task.old_bits + place * W, fresh);
    }
  } while (mask != 0);
}

// Goes on from `done` up to `end`, one unit after the other.
template <std::size_t W>
inline Progress diff_units(DiffTask task, Progress done, std::size_t end) noexcept {
  task.begin = done.stop;
  task.end = end;
  task.offsets += done.found;
  task.changed_old += done.found * W;
  task.changed_new += done.found * W;
  task.capacity -= done.found;
  const Progress more = scalar_table.diff(task, W);
  return {more.stop, done.found + more.found};
}

// Units before the first that begins a cache line: vectors that straddle lines cost twice.
template <std::size_t W>
inline std::size_t units_to_line(const unsigned char* at) noexcept {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(at) % 64;
  return past % W == 0 ? (64 - past) % 64 / W : 0;
}

// Blocks of several groups, so that equal stretches cost one branch; the ends, and the last of the room for
// changes, are left to the scalar kernel.
template <typename V, std::size_t W>
Progress diff_width(const DiffTask& task) noexcept {
  constexpr std::size_t kBlock = V::kGroupsAtOnce * kGroup;
  const std::size_t count = task.end - task.begin;
  const std::size_t to_line = units_to_line<W>(task.new_bits + task.begin * W);
  const std::size_t first = task.begin + (to_line < count ? to_line : count);
  auto [at, found] = diff_units<W>(task, {task.begin, 0}, first);
  for (; task.end - at >= kBlock && task.capacity - found >= kBlock; at += kBlock) {
    std::uint64_t masks[V::kGroupsAtOnce];
    std::uint64_t any = 0;
    for (std::size_t g = 0; g < V::kGroupsAtOnce; ++g) {
      const std::size_t here = (at + g * kGroup) * W;
      any |= masks[g] = V::template differing<W>(task.old_bits + here, task.new_bits + here);
    }
    if (any == 0) continue;
    for (std::size_t g = 0; g < V::kGroupsAtOnce; ++g) {
      V::template emit<W>(task, at + g * kGroup, masks[g], found);
      found += static_cast<std::size_t>(std::popcount(masks[g]));
    }
  }
  return diff_units<W>(task, {at, found}, task.end);
}

template <typename V>
Progress diff_all(const DiffTask& task, unsigned unit_bytes) noexcept {
  return with_width(unit_bytes, [&](auto width) { return diff_width<V, width()>(task); });
}

// More, and their sums no longer fit in the registers.
constexpr std::size_t kRowsAtOnce = 4;

// A 64-bit word holds 8 / W digits. Each is brought to the low half and squared; the sums wrap, so their order
// is free. Several rows share each load of a key. Meanwhile the next rows are fetched in order, which the
// processor does not foresee from reading rows side by side. Row keys are applied once a row.
template <typename V, std::size_t W, std::size_t kRows>
inline void add_rows(const unsigned char* digits, std::uint64_t row, Lanes seeds, typename V::Word& total_a,
                     typename V::Word& total_b) noexcept {
  constexpr std::size_t kPerWord = 8 / W;
  constexpr std::size_t kWords = kRowDigits / kPerWord;
  constexpr std::size_t kRowBytes = kRowDigits * W;
  const auto& word_keys = keys.word[std::countr_zero(W)];
  typename V::Word sum_a[kRows];
  typename V::Word sum_b[kRows];
  for (std::size_t r = 0; r < kRows; ++r) sum_a[r] = sum_b[r] = V::zero();
  for (std::size_t word = 0; word < kWords; word += V::kLanes) {
    typename V::Word data[kRows];
    for (std::size_t r = 0; r < kRows; ++r) data[r] = V::load_once(digits + r * kRowBytes + word * 8);
    const unsigned char* ahead = digits + kRows * kRowBytes + word * 8 * kRows;
    for (std::size_t byte = 0; byte < kRows * V::kLanes * 8; byte += 64) __builtin_prefetch(ahead + byte);
    for (std::size_t i = 0; i < kPerWord; ++i) {
      const auto key_a = V::load(&word_keys[0][i * kWords + word]);
      const auto key_b = V::load(&word_keys[1][i * kWords + word]);
      for (std::size_t r = 0; r < kRows; ++r) {
        const auto digit = V::template digit<W>(data[r], i);
        const auto square = V::mul32(digit, digit);
        sum_a[r] = V::template add_product<W>(sum_a[r], square, key_a);
        sum_b[r] = V::template add_product<W>(sum_b[r], square, key_b);
      }
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    total_a = V::add(total_a, V::mul64(sum_a[r], row_key(seeds.a, row + r)));
    total_b = V::add(total_b, V::mul64(sum_b[r], row_key(seeds.b, row + r)));
  }
}

template <typename V, std::size_t W>
Lanes rows_width(const unsigned char* digits, std::size_t row_count, std::uint64_t row, Lanes seeds) noexcept {
  auto total_a = V::zero();
  auto total_b = V::zero();
  std::size_t r = 0;
  for (; row_count - r >= kRowsAtOnce; r += kRowsAtOnce) {
    add_rows<V, W, kRowsAtOnce>(digits + r * kRowDigits * W, row + r, seeds, total_a, total_b);
  }
  for (; r < row_count; ++r) add_rows<V, W, 1>(digits + r * kRowDigits * W, row + r, seeds, total_a, total_b);
  return {V::sum(total_a), V::sum(total_b)};
}

template <typename V>
Lanes rows_all(const unsigned char* digits, std::size_t row_count, unsigned digit_bytes, std::uint64_t row,
               Lanes seeds) noexcept {
  return with_width(digit_bytes, [&](auto width) {
    constexpr std::size_t kDigitBytes = width() == 8 ? 4 : width();
    return rows_width<V, kDigitBytes>(digits, row_count, row, seeds);
  });
}

template <typename V>
std::uint64_t read_all(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept {
  constexpr std::size_t kVector = V::kLanes * 8;
  typename V::Word sums[8];
  for (auto& sum : sums) sum = V::zero();
  std::size_t at = 0;
  for (; size - at >= 4 * kVector; at += 4 * kVector) {
    for (std::size_t i = 0; i < 4; ++i) {
      sums[i] = V::add(sums[i], V::load(first + at + i * kVector));
      sums[4 + i] = V::add(sums[4 + i], V::load(second + at + i * kVector));
    }
  }
  std::uint64_t total = scalar_table.read_words(first + at, second + at, size - at);
  for (const auto& sum : sums) total += V::sum(sum);
  return total;
}

template <typename V>
constexpr Table table_of() noexcept {
  return {diff_all<V>, rows_all<V>, read_all<V>, split_all, join_all};
}

}  // namespace
}  // namespace syncline
