// Writes zstd frames (RFC 8878) of nothing but Huffman-coded literals, for noise from a small alphabet. The rules of
// kernels.h hold. src/syncline/kernels/literals_reference.py says the same in the plainest way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

constexpr std::size_t kLiteralBlock = 1 << 17;

// Room for a frame: its header, and blocks that are never larger than what they hold.
constexpr std::size_t frame_room(std::size_t size) {
  return 10 + size + 3 * (size / kLiteralBlock + 1);
}

// Returns the size of the frame; 0 if a byte is above 128, for which the short description of a code has no room. `frame`
// has `frame_room(size)` bytes; `size` is below 2^32.
std::size_t compress_literals(const unsigned char* data, std::size_t size, unsigned char* frame) noexcept;

}  // namespace syncline
