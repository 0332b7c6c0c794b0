// The kernels: pointers, lengths and a status. The caller owns all memory and has checked that lengths fit;
// nothing here allocates, throws, starts a thread or keeps state, except which instruction set is in use.
// Pointers to bytes need no alignment. Units are 1, 2, 4 or 8 bytes. docs/reference/format.md says what they compute.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

enum class Status : int {
  ok = 0,
  out_of_range,   // an offset is not below the limit
  not_ascending,  // an offset is not above the one before it
  cut_short,      // the gap bytes end inside a gap
  wrong_count,    // the gap bytes hold more gaps than announced
  differs,        // other bits stand there
};

// What went wrong first, and where: the index of an offset, or for wrong_count of a byte.
struct Outcome {
  Status status;
  std::size_t position;
};

enum class Isa : int { scalar = 0, avx2, avx512, neon };
constexpr int kIsaCount = 4;

const char* isa_name(Isa isa) noexcept;
// Whether this build has kernels for it and this processor runs them.
bool isa_available(Isa isa) noexcept;
// Use these kernels from now on; false, and nothing changes, if they are not available.
bool select_isa(Isa isa) noexcept;
// The one in use: the fastest available unless `select_isa` chose another.
Isa selected_isa() noexcept;

struct DiffTask {
  unsigned char* old_bits;  // written only if `refresh`
  const unsigned char* new_bits;
  std::size_t begin, end;  // units to compare; offsets count from unit 0
  bool refresh;            // make old equal new, up to `Progress::stop`
  std::uint32_t* offsets;  // the three outputs have room for `capacity` changes
  unsigned char* changed_old;
  unsigned char* changed_new;
  std::size_t capacity;
};

struct Progress {
  std::size_t stop;   // units before this one are compared; less than `end` when there was no more room
  std::size_t found;  // changes written
};

Progress diff(const DiffTask& task, unsigned unit_bytes) noexcept;

// Nothing is written if any offset is out of range. Later entries win.
Outcome scatter(unsigned char* target, std::size_t target_count, const std::uint32_t* offsets,
                const unsigned char* bits, std::size_t count, unsigned unit_bytes) noexcept;
Outcome gather(const unsigned char* source, std::size_t source_count, const std::uint32_t* offsets, unsigned char* bits,
               std::size_t count, unsigned unit_bytes) noexcept;

// Whether `bits` are what stands at the offsets, which need not rise.
Outcome compare(const unsigned char* source, std::size_t source_count, const std::uint32_t* offsets,
                const unsigned char* bits, std::size_t count, unsigned unit_bytes) noexcept;
// Whether the offsets rise strictly and are below the limit, which is not above 2^32.
Outcome check_ascending(const std::uint32_t* offsets, std::size_t count, std::uint64_t limit) noexcept;

// The two lanes of a fingerprint, or the two seeds of a tensor's row keys.
struct Lanes {
  std::uint64_t a, b;
};

Lanes fingerprint(const unsigned char* bits, std::size_t count, unsigned unit_bytes, std::uint64_t start,
                  Lanes seeds) noexcept;
Lanes fingerprint_change(const std::uint32_t* offsets, const unsigned char* old_bits, const unsigned char* new_bits,
                         std::size_t count, unsigned unit_bytes, std::uint64_t start, Lanes seeds) noexcept;

// `low` is (low_bytes, count); `high` has room for count + (last offset >> 8 * low_bytes) / 255 bytes, of
// which `high_size` are used; no more is written whatever the offsets are.
Outcome encode_gaps(const std::uint32_t* offsets, std::size_t count, unsigned low_bytes, unsigned char* low,
                    unsigned char* high, std::size_t* high_size) noexcept;
// Any input gives `count` ascending offsets below `limit` (at most 2^32), or a status.
Outcome decode_gaps(const unsigned char* low, unsigned low_bytes, const unsigned char* high, std::size_t high_size,
                    std::uint64_t limit, std::uint32_t* offsets, std::size_t count) noexcept;

// How many bits a symbol has (1, 4 or 8), and how many values exceed what a symbol tells.
struct SymbolCounts {
  unsigned bits;
  std::size_t escaped;
};

// docs/reference/format.md section 6.5. Every change differs from its base. `symbols` has room for a byte a change, `excess`
// for a unit more than there are changes.
SymbolCounts write_symbols(const unsigned char* old_bits, const unsigned char* new_bits, std::size_t count,
                           unsigned unit_bytes, bool is_step, unsigned char* symbols, unsigned char* excess) noexcept;
// False for symbols and excesses that `write_symbols` makes of nothing: another number of them, one that does not fit
// into a unit, bits set after the last symbol. `bits` is 1, 2, 4 or 8, and the symbols are as many bytes as that takes.
bool read_symbols(const unsigned char* old_bits, std::size_t count, unsigned unit_bytes, bool is_step,
                  const unsigned char* symbols, unsigned bits, const unsigned char* excess, std::size_t escaped,
                  unsigned char* new_bits) noexcept;

// One axis of a block: `count` elements, so far apart on this side and on the other.
struct Axis {
  std::uint64_t stride, count, other;
};

// Positions on one side of a block that it holds, and their bits, to where they are on the other side. Strides fall and
// are not 0; counts are not 0; there is an axis. Any positions will do. The outputs have room for all of them.
struct MapTask {
  const std::uint64_t* positions;
  const unsigned char* bits;
  std::size_t count;
  const Axis* axes;
  std::size_t axis_count;
  std::uint64_t first, other;  // where the block's first element is on this side and on the other
  std::uint64_t* mapped;
  unsigned char* moved;
};
std::size_t map_positions(const MapTask& task, unsigned unit_bytes) noexcept;

// out = a ^ b, byte by byte.
void xor_bytes(const unsigned char* a, const unsigned char* b, unsigned char* out, std::size_t size) noexcept;

// Plane p, `count` bytes from planes + p * count on, holds byte p of every unit, the lowest first; if `rotated`, of
// every unit rotated left by one bit.
void split_planes(const unsigned char* units, std::size_t count, unsigned unit_bytes, bool rotated,
                  unsigned char* planes) noexcept;
// Undoes it; the planes may lie anywhere but in `units`.
void join_planes(const unsigned char* const* planes, std::size_t count, unsigned unit_bytes, bool rotated,
                 unsigned char* units) noexcept;

// The sum of all bytes of both buffers as 64-bit words (size in bytes, a multiple of 8): does nothing but
// read, and so measures the roof that the other kernels are compared with.
std::uint64_t read_words(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept;

}  // namespace syncline
