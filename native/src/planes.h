// Byte planes, written once as plain loops that the compiler turns into vectors with each file's own flags.
#pragma once

#include "table.h"

namespace syncline {
namespace {

// Units taken at a time, so that they are in the nearest cache when the next plane is made of them.
constexpr std::size_t kPlaneBlock = 2048;

template <typename Word>
inline Word rotated_left(Word unit, unsigned by) noexcept {
  return static_cast<Word>(unit << by | unit >> (8 * sizeof(Word) - by));
}

template <std::size_t W, bool kRotated>
inline void split_width(const unsigned char* __restrict units, std::size_t count, unsigned char* __restrict planes) {
  for (std::size_t begin = 0; begin < count; begin += kPlaneBlock) {
    const std::size_t end = count - begin < kPlaneBlock ? count : begin + kPlaneBlock;
    for (std::size_t plane = 0; plane < W; ++plane) {
      unsigned char* __restrict to = planes + plane * count;
      for (std::size_t at = begin; at < end; ++at) {
        auto unit = load<Unit<W>>(units + at * W);
        if constexpr (kRotated) unit = rotated_left(unit, 1);
        to[at] = static_cast<unsigned char>(unit >> 8 * plane);
      }
    }
  }
}

template <std::size_t W, bool kRotated>
inline void join_width(const unsigned char* const* planes, std::size_t count, unsigned char* __restrict units) {
  const unsigned char* from[W];
  for (std::size_t plane = 0; plane < W; ++plane) from[plane] = planes[plane];
  // Planes are only read, and the units are memory of their own.
#pragma GCC ivdep
  for (std::size_t at = 0; at < count; ++at) {
    Unit<W> unit = 0;
    for (std::size_t plane = 0; plane < W; ++plane) {
      unit = static_cast<Unit<W>>(unit | static_cast<Unit<W>>(from[plane][at]) << 8 * plane);
    }
    if constexpr (kRotated) unit = rotated_left(unit, 8 * W - 1);
    store(units + at * W, unit);
  }
}

inline void split_all(const unsigned char* units, std::size_t count, unsigned unit_bytes, bool rotated,
                      unsigned char* planes) noexcept {
  with_width(unit_bytes, [&](auto width) {
    if (rotated) return split_width<width(), true>(units, count, planes);
    split_width<width(), false>(units, count, planes);
  });
}

inline void join_all(const unsigned char* const* planes, std::size_t count, unsigned unit_bytes, bool rotated,
                     unsigned char* units) noexcept {
  with_width(unit_bytes, [&](auto width) {
    if (rotated) return join_width<width(), true>(planes, count, units);
    join_width<width(), false>(planes, count, units);
  });
}

}  // namespace
}  // namespace syncline
