// The kernels of `tight`: classes of units by the exponent of their base, and the bits that tell changes.
// The rules of kernels.h hold. docs/reference/format.md section 6.7 says what they compute.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

constexpr unsigned kMaxClasses = 16;

// The class of a unit is (bits >> shift & mask) - lowest, but at least 0 and at most count - 1.
struct ClassMap {
  std::uint32_t shift, mask, lowest, count;
};

// What a window's header says about one class. `marks` are the changed members, or if `unchanged_marked` the
// others; `large_marks` the steps of more than one ulp, or if `small_marked` the others.
struct ClassEntry {
  std::uint32_t changes, marks, gap_bits, unchanged_marked;
  std::uint32_t large, large_marks, run_bits, small_marked, excess_bits;
};

enum class TightStatus : int {
  ok = 0,
  beyond_members,  // a mark of class `index` is not below its members in the base; `value` is the mark
  wrong_changes,   // class `index` has more or fewer unmarked members than changes
  not_ascending,   // offset `index` is not above the one before, or not in the window
  wrong_unary,     // the unary bits do not hold exactly the ones announced, the last in the last byte
  wrong_fields,    // the field bits do not fill their bytes: there are `value` of them
  beyond_limit,    // a mark of class `index` is not below `value`
  too_large,       // a step of class `index` does not fit into the unit
};

struct TightOutcome {
  TightStatus status;
  std::size_t index;
  std::uint64_t value;
};

// Counts the members of each class in the base, and ranks the changed ones among them. The base is `units`,
// except at `offsets` (ascending), where it is `old_bits`. `ranks` and `order` take `changes` numbers, class
// by class; members[c] and changes_of[c] are set for every class.
struct RankTask {
  const unsigned char* units;
  std::size_t count;
  const std::uint32_t* offsets;
  const unsigned char* old_bits;
  std::size_t changes;
  ClassMap map;
  std::uint64_t* members;
  std::uint64_t* changes_of;
  std::uint32_t* ranks;
  std::uint32_t* order;
};
TightOutcome rank_changes(const RankTask& task, unsigned unit_bytes) noexcept;

// Finds the changed units of a base. `marks` are strictly ascending in each class; the three outputs have
// room for all changes that the entries announce, and nothing more is ever written.
struct FindTask {
  const unsigned char* base;
  std::size_t count;
  ClassMap map;
  const ClassEntry* entries;  // map.count of them
  const std::uint32_t* marks;
  std::uint32_t* offsets;
  std::uint32_t* order;
  unsigned char* old_bits;
};
TightOutcome find_changes(const FindTask& task, unsigned unit_bytes) noexcept;

// `unary` and `fields` are zeroed and have room for all bits; sizes in bytes are returned through the last two.
void write_lists(const ClassEntry* entries, unsigned classes, const std::uint32_t* marks, const unsigned char* zigzag,
                 unsigned unit_bytes, unsigned char* unary, unsigned char* fields, std::size_t* unary_size,
                 std::size_t* fields_size) noexcept;

// Any input is refused or gives ascending marks, of each class below `limit`, and steps that are not 0.
TightOutcome read_lists(const ClassEntry* entries, unsigned classes, const unsigned char* unary, std::size_t unary_size,
                        const unsigned char* fields, std::size_t fields_size, std::uint64_t limit, unsigned unit_bytes,
                        std::uint32_t* marks, unsigned char* zigzag) noexcept;

}  // namespace syncline
