// What one instruction set offers, and what all files of kernels share. Shared code is static: each file is
// compiled with its own flags, and the linker must never choose an AVX copy for the baseline.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace syncline {

struct Table {
  Progress (*diff)(const DiffTask&, unsigned unit_bytes) noexcept;
  // Whole rows of 1024 digits of `digit_bytes` (1, 2 or 4) each, the first of which is row `row`.
  Lanes (*fingerprint_rows)(const unsigned char* digits, std::size_t row_count, unsigned digit_bytes, std::uint64_t row,
                            Lanes seeds) noexcept;
  std::uint64_t (*read_words)(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept;
  void (*split_planes)(const unsigned char* units, std::size_t count, unsigned unit_bytes, bool rotated,
                       unsigned char* planes) noexcept;
  void (*join_planes)(const unsigned char* const* planes, std::size_t count, unsigned unit_bytes, bool rotated,
                      unsigned char* units) noexcept;
};

extern const Table scalar_table;
extern const Table avx2_table;
extern const Table avx512_table;
extern const Table neon_table;

// The kernels in use.
const Table& table() noexcept;

constexpr std::size_t kRowDigits = 1024;

// Column keys, X of docs/reference/format.md section 5.
struct Keys {
  alignas(64) std::uint32_t column[2][kRowDigits];  // [lane][column]
  // The same for vectors: a 64-bit word of data holds 8 / digit_bytes digits, and the keys of every word's
  // i-th digit lie together: [log2(digit_bytes)][lane][i * words + word].
  alignas(64) std::uint64_t word[3][2][kRowDigits];
};
extern const Keys keys;

[[maybe_unused]] static constexpr std::uint64_t splitmix(std::uint64_t x) noexcept {
  std::uint64_t z = x + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Row keys, Y of docs/reference/format.md section 5.
[[maybe_unused]] static constexpr std::uint64_t row_key(std::uint64_t seed, std::uint64_t row) noexcept {
  return splitmix(seed + row * 0xD1342543DE82EF95u) | 1;
}

// Part of one row: `count` digits from `column` on, all within the row; the row key is applied.
Lanes fingerprint_part(const unsigned char* digits, std::size_t count, unsigned digit_bytes, std::size_t column,
                       std::uint64_t row, Lanes seeds) noexcept;

template <std::size_t W>
using Unit = std::conditional_t<
    W == 1, std::uint8_t,
    std::conditional_t<W == 2, std::uint16_t, std::conditional_t<W == 4, std::uint32_t, std::uint64_t>>>;

// Pointers are to bytes of any alignment, so that units are read and written through these two.
template <typename Word>
static inline Word load(const unsigned char* at) noexcept {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

template <typename Word>
static inline void store(unsigned char* at, Word word) noexcept {
  std::memcpy(at, &word, sizeof word);
}

// Calls `body` with the width as a compile-time constant.
template <typename Body>
static inline auto with_width(unsigned width, Body body) noexcept {
  switch (width) {
    case 1:
      return body(std::integral_constant<std::size_t, 1>{});
    case 2:
      return body(std::integral_constant<std::size_t, 2>{});
    case 4:
      return body(std::integral_constant<std::size_t, 4>{});
    default:
      return body(std::integral_constant<std::size_t, 8>{});
  }
}

}  // namespace syncline
