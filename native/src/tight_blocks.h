// The passes of `tight` over a base, written once over an instruction set `V` and compiled once in each of its
// files. V offers `classify<W>`, which finds the classes of 64 units, and `select`, which finds a set bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "tight.h"

namespace syncline {

// What one instruction set offers.
struct TightTable {
  TightOutcome (*rank)(const RankTask&, unsigned unit_bytes) noexcept;
  TightOutcome (*find)(const FindTask&, unsigned unit_bytes) noexcept;
};
extern const TightTable scalar_tight_table;
extern const TightTable avx2_tight_table;
extern const TightTable avx512_tight_table;

namespace {

constexpr std::size_t kBlock = 64;

template <std::size_t W>
struct TightUnit;
template <>
struct TightUnit<1> {
  using type = std::uint8_t;
};
template <>
struct TightUnit<2> {
  using type = std::uint16_t;
};
template <>
struct TightUnit<4> {
  using type = std::uint32_t;
};
template <>
struct TightUnit<8> {
  using type = std::uint64_t;
};

template <std::size_t W>
inline std::uint64_t unit_at(const unsigned char* units, std::size_t index) noexcept {
  typename TightUnit<W>::type unit;
  std::memcpy(&unit, units + index * W, W);
  return unit;
}

template <std::size_t W>
inline void copy_unit(unsigned char* to, std::size_t to_index, const unsigned char* from,
                      std::size_t from_index) noexcept {
  std::memcpy(to + to_index * W, from + from_index * W, W);
}

inline unsigned class_of(std::uint64_t unit, const ClassMap& map) noexcept {
  const auto exponent = static_cast<std::uint32_t>(unit >> map.shift) & map.mask;
  const std::uint32_t above = exponent > map.lowest ? exponent - map.lowest : 0;
  return std::min(above, map.count - 1);
}

// The classes of up to 64 units, and for each class which units are its members.
struct Block {
  alignas(64) std::uint8_t class_of[kBlock];
  alignas(64) std::uint64_t members[kMaxClasses];
};

template <std::size_t W, unsigned C>
inline void classify_some(const unsigned char* units, std::size_t count, const ClassMap& map, Block* block) noexcept {
  for (unsigned c = 0; c < C; ++c) block->members[c] = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned c = class_of(unit_at<W>(units, i), map);
    block->class_of[i] = static_cast<std::uint8_t>(c);
    block->members[c] |= std::uint64_t{1} << i;
  }
}

// `C` is the number of classes, rounded up: a constant, so that loops over classes are unrolled. So many blocks
// are classified before any is looked at, so that vectors load what scalars have long stored.
constexpr std::size_t kAhead = 8;

template <typename V, std::size_t W, unsigned C>
inline void classify_ahead(const unsigned char* units, std::size_t first, std::size_t last, const ClassMap& map,
                           Block* block) noexcept {
  for (; last - first >= kBlock; first += kBlock, ++block) V::template classify<W, C>(units + first * W, map, block);
  if (first != last) classify_some<W, C>(units + first * W, last - first, map, block);
}

// How many members of each class there are up to its next mark, for instruction sets that count one by one.
template <unsigned C>
class PlainLeft {
 public:
  explicit PlainLeft(const std::int64_t* left) noexcept { std::copy_n(left, kMaxClasses, left_); }
  // Takes a block's members off; returns one bit for each class of which less than nothing is left.
  unsigned take(const std::uint64_t* members) noexcept {
    unsigned short_of = 0;
    for (unsigned c = 0; c < C; ++c) {
      left_[c] -= std::popcount(members[c]);
      short_of |= static_cast<unsigned>(left_[c] < 0) << c;
    }
    return short_of;
  }
  std::int64_t get(unsigned c) const noexcept { return left_[c]; }
  void set(unsigned c, std::int64_t left) noexcept { left_[c] = left; }

 private:
  std::int64_t left_[kMaxClasses];
};

// Where the changes of each class begin among all of them, by the classes of the old bits.
template <std::size_t W>
inline void count_changes(const RankTask& task, std::uint32_t* next) noexcept {
  for (unsigned c = 0; c < task.map.count; ++c) task.changes_of[c] = 0;
  for (std::size_t i = 0; i < task.changes; ++i) ++task.changes_of[class_of(unit_at<W>(task.old_bits, i), task.map)];
  std::uint32_t start = 0;
  for (unsigned c = 0; c < task.map.count; ++c) {
    next[c] = start;
    start += static_cast<std::uint32_t>(task.changes_of[c]);
  }
}

template <typename V, std::size_t W, unsigned C>
TightOutcome rank_width(const RankTask& task) noexcept {
  std::uint32_t next[kMaxClasses];
  alignas(64) std::uint64_t seen[kMaxClasses] = {};
  count_changes<W>(task, next);
  Block blocks[kAhead] = {};
  std::size_t change = 0;
  for (std::size_t first = 0; first < task.count; first += kAhead * kBlock) {
    const std::size_t last = std::min(first + kAhead * kBlock, task.count);
    classify_ahead<V, W, C>(task.units, first, last, task.map, blocks);
    Block* block = blocks;
    for (std::size_t at = first; at < last; at += kBlock, ++block) {
      const std::size_t end = std::min(at + kBlock, last);
      for (std::size_t least = at; change < task.changes && task.offsets[change] < end; ++change) {
        const std::size_t offset = task.offsets[change];
        if (offset < least) return {TightStatus::not_ascending, change, 0};
        least = offset + 1;
        const std::uint64_t bit = std::uint64_t{1} << (offset - at);
        // The base, not what has become of it, says the class.
        const unsigned c = class_of(unit_at<W>(task.old_bits, change), task.map);
        const unsigned now = block->class_of[offset - at];
        if (c != now) [[unlikely]] {
          block->members[now] &= ~bit;
          block->members[c] |= bit;
        }
        const auto before = static_cast<unsigned>(std::popcount(block->members[c] & (bit - 1)));
        task.ranks[next[c]] = static_cast<std::uint32_t>(seen[c] + before);
        task.order[next[c]++] = static_cast<std::uint32_t>(change);
      }
      for (unsigned c = 0; c < C; ++c) seen[c] += static_cast<unsigned>(std::popcount(block->members[c]));
    }
  }
  if (change < task.changes) return {TightStatus::not_ascending, change, 0};
  for (unsigned c = 0; c < task.map.count; ++c) task.members[c] = seen[c];
  return {TightStatus::ok, 0, 0};
}

// One class on the way through a base.
struct Walk {
  std::int64_t left[kMaxClasses];          // at first: members up to the next mark
  const std::uint32_t* mark[kMaxClasses];  // that mark, and where they end
  const std::uint32_t* end[kMaxClasses];
  std::uint32_t next[kMaxClasses];  // index of the next change of the class
  std::uint32_t stop[kMaxClasses];
  unsigned inverted;  // one bit for each class whose unchanged members are marked
};

constexpr std::int64_t kNoMark = std::int64_t{1} << 62;

inline Walk begin_walk(const FindTask& task) noexcept {
  Walk walk;
  walk.inverted = 0;
  std::uint32_t start = 0;
  const std::uint32_t* mark = task.marks;
  std::fill_n(walk.left, kMaxClasses, kNoMark);
  for (unsigned c = 0; c < task.map.count; ++c) {
    const ClassEntry& entry = task.entries[c];
    walk.mark[c] = mark;
    walk.end[c] = mark += entry.marks;
    if (entry.marks != 0) walk.left[c] = *walk.mark[c];
    walk.next[c] = start;
    walk.stop[c] = start += entry.changes;
    if (entry.changes != 0 && entry.unchanged_marked != 0) walk.inverted |= 1u << c;
  }
  return walk;
}

// The marked ones of a block's members of class `c`, of which there is at least one: `left` is below 0.
template <typename V, typename Left>
inline std::uint64_t take_marks(Walk* walk, Left* all_left, unsigned c, std::uint64_t members) noexcept {
  const int count = std::popcount(members);
  std::uint64_t marked = 0;
  std::int64_t left = all_left->get(c);
  const std::uint32_t* mark = walk->mark[c];
  do {
    marked |= V::select(members, static_cast<std::uint64_t>(left + count));
    const std::uint32_t passed = *mark++;
    left = mark != walk->end[c] ? left + (*mark - passed) : kNoMark;
  } while (left < 0);
  walk->mark[c] = mark;
  all_left->set(c, left);
  return marked;
}

// Returns kMaxClasses, or the class that has more changes than announced.
template <std::size_t W>
inline unsigned emit_changes(const FindTask& task, Walk* walk, const Block& block, std::size_t at,
                             std::uint64_t changed, std::size_t* found) noexcept {
  for (; changed != 0; changed &= changed - 1) {
    const auto place = static_cast<std::size_t>(std::countr_zero(changed));
    const unsigned c = block.class_of[place];
    if (walk->next[c] == walk->stop[c]) return c;
    task.order[*found] = walk->next[c]++;
    task.offsets[*found] = static_cast<std::uint32_t>(at + place);
    copy_unit<W>(task.old_bits, *found, task.base, at + place);
    ++*found;
  }
  return kMaxClasses;
}

inline TightOutcome end_walk(const FindTask& task, const Walk& walk) noexcept {
  for (unsigned c = 0; c < task.map.count; ++c) {
    if (walk.mark[c] != walk.end[c]) return {TightStatus::beyond_members, c, *walk.mark[c]};
    if (walk.next[c] != walk.stop[c]) return {TightStatus::wrong_changes, c, 0};
  }
  return {TightStatus::ok, 0, 0};
}

template <typename V, std::size_t W, unsigned C>
TightOutcome find_width(const FindTask& task) noexcept {
  Walk walk = begin_walk(task);
  typename V::template Left<C> left(walk.left);
  Block blocks[kAhead] = {};
  std::size_t found = 0;
  for (std::size_t first = 0; first < task.count; first += kAhead * kBlock) {
    const std::size_t last = std::min(first + kAhead * kBlock, task.count);
    classify_ahead<V, W, C>(task.base, first, last, task.map, blocks);
    const Block* block = blocks;
    for (std::size_t at = first; at < last; at += kBlock, ++block) {
      std::uint64_t changed = 0;
      for (unsigned hits = left.take(block->members); hits != 0; hits &= hits - 1) {
        const auto c = static_cast<unsigned>(std::countr_zero(hits));
        changed |= take_marks<V>(&walk, &left, c, block->members[c]);
      }
      for (unsigned rest = walk.inverted; rest != 0; rest &= rest - 1) {
        changed ^= block->members[static_cast<unsigned>(std::countr_zero(rest))];
      }
      if (changed == 0) continue;
      const unsigned wrong = emit_changes<W>(task, &walk, *block, at, changed, &found);
      if (wrong != kMaxClasses) return {TightStatus::wrong_changes, wrong, 0};
    }
  }
  return end_walk(task, walk);
}

template <typename V, std::size_t W>
TightOutcome rank_classes(const RankTask& task) noexcept {
  switch ((task.map.count + 3) / 4) {
    case 1:
      return rank_width<V, W, 4>(task);
    case 2:
      return rank_width<V, W, 8>(task);
    case 3:
      return rank_width<V, W, 12>(task);
    default:
      return rank_width<V, W, 16>(task);
  }
}

template <typename V, std::size_t W>
TightOutcome find_classes(const FindTask& task) noexcept {
  switch ((task.map.count + 3) / 4) {
    case 1:
      return find_width<V, W, 4>(task);
    case 2:
      return find_width<V, W, 8>(task);
    case 3:
      return find_width<V, W, 12>(task);
    default:
      return find_width<V, W, 16>(task);
  }
}

template <typename V>
TightOutcome rank_all(const RankTask& task, unsigned unit_bytes) noexcept {
  switch (unit_bytes) {
    case 1:
      return rank_classes<V, 1>(task);
    case 2:
      return rank_classes<V, 2>(task);
    case 4:
      return rank_classes<V, 4>(task);
    default:
      return rank_classes<V, 8>(task);
  }
}

template <typename V>
TightOutcome find_all(const FindTask& task, unsigned unit_bytes) noexcept {
  switch (unit_bytes) {
    case 1:
      return find_classes<V, 1>(task);
    case 2:
      return find_classes<V, 2>(task);
    case 4:
      return find_classes<V, 4>(task);
    default:
      return find_classes<V, 8>(task);
  }
}

}  // namespace
}  // namespace syncline
