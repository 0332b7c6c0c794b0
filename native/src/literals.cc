// One Huffman code a block of 128 KiB, four streams side by side; the same on every instruction set.
#include "literals.h"

#include <algorithm>

#include "table.h"

namespace syncline {
namespace {

constexpr unsigned kHighest = 128;
constexpr unsigned kMaxBits = 11;
constexpr std::size_t kStreams = 4;
constexpr std::size_t kLeastForCode = 256;
// More than headers, description and the ends of streams take together.
constexpr std::size_t kOverhead = 128;
enum : std::uint32_t { kRaw = 0, kRepeated = 1, kCompressed = 2 };

struct Counts {
  std::uint32_t of[kStreams][256];
  std::uint32_t total[kHighest + 1];
};

// Where each of the four streams begins; the last may be shorter.
std::size_t quarter(std::size_t size) noexcept {
  return (size + kStreams - 1) / kStreams;
}

// False if a byte is above the highest.
bool count_bytes(const unsigned char* data, std::size_t size, Counts& counts) noexcept {
  std::memset(counts.of, 0, sizeof counts.of);
  const std::size_t step = quarter(size);
  const std::size_t shortest = size - (kStreams - 1) * step;
  for (std::size_t i = 0; i < shortest; ++i) {
    for (std::size_t s = 0; s < kStreams; ++s) ++counts.of[s][data[s * step + i]];
  }
  for (std::size_t s = 0; s + 1 < kStreams; ++s) {
    for (std::size_t i = shortest; i < step; ++i) ++counts.of[s][data[s * step + i]];
  }
  for (unsigned symbol = 0; symbol < 256; ++symbol) {
    const std::uint32_t total =
        counts.of[0][symbol] + counts.of[1][symbol] + counts.of[2][symbol] + counts.of[3][symbol];
    if (symbol <= kHighest) counts.total[symbol] = total;
    if (symbol > kHighest && total != 0) return false;
  }
  return true;
}

// Lengths of the best prefix code of at most 11 bits, by package-merge: a row is the symbols, rarest first, merged with
// the pairs of the row before; of the last row the first 2n - 2 are taken, and of each row before as many pairs as were.
// A symbol is as long as rows took it. Returns the longest.
unsigned code_lengths(const Counts& counts, unsigned char* lengths) noexcept {
  unsigned char order[kHighest + 1];
  std::size_t n = 0;
  for (unsigned symbol = 0; symbol <= kHighest; ++symbol) {
    lengths[symbol] = 0;
    if (counts.total[symbol] != 0) order[n++] = static_cast<unsigned char>(symbol);
  }
  std::sort(order, order + n, [&](auto a, auto b) {
    return counts.total[a] != counts.total[b] ? counts.total[a] < counts.total[b] : a < b;
  });
  std::uint32_t pairs[kHighest + 1];
  std::size_t pair_count = 0;
  bool is_symbol[kMaxBits][2 * (kHighest + 1)];
  std::size_t sizes[kMaxBits];
  for (unsigned row = 0; row < kMaxBits; ++row) {
    std::uint32_t merged[2 * (kHighest + 1)];
    std::size_t size = 0;
    for (std::size_t symbol = 0, pair = 0; symbol < n || pair < pair_count; ++size) {
      const bool takes_symbol = pair == pair_count || (symbol < n && counts.total[order[symbol]] <= pairs[pair]);
      is_symbol[row][size] = takes_symbol;
      merged[size] = takes_symbol ? counts.total[order[symbol++]] : pairs[pair++];
    }
    sizes[row] = size;
    pair_count = size / 2;
    for (std::size_t pair = 0; pair < pair_count; ++pair) pairs[pair] = merged[2 * pair] + merged[2 * pair + 1];
  }
  unsigned longest = 0;
  std::size_t taken = 2 * n - 2;
  for (unsigned row = kMaxBits; row-- > 0 && taken != 0; ++longest) {
    taken = std::min(taken, sizes[row]);
    std::size_t symbols = 0;
    for (std::size_t i = 0; i < taken; ++i) symbols += is_symbol[row][i];
    for (std::size_t i = 0; i < symbols; ++i) ++lengths[order[i]];
    taken = 2 * (taken - symbols);
  }
  return longest;
}

// Codes above their lengths, so that an entry can be what the next one is shifted by: the longest come first, and of one
// length the smallest symbol.
struct Code {
  std::uint32_t entry[256];
};

std::uint64_t bits_of(std::uint32_t entry) noexcept {
  return entry >> 8;
}

unsigned length_of(std::uint32_t entry) noexcept {
  return entry & 63;
}

void make_code(const unsigned char* lengths, unsigned longest, Code& code) noexcept {
  std::uint32_t next = 0;
  for (unsigned bits = longest; bits > 0; --bits) {
    for (unsigned symbol = 0; symbol <= kHighest; ++symbol) {
      if (lengths[symbol] == bits) code.entry[symbol] = next++ << 8 | bits;
    }
    next >>= 1;
  }
}

// Writes one stream, last symbol first, and never beyond its end.
class Stream {
 public:
  Stream(const unsigned char* first, const unsigned char* last, unsigned char* at, unsigned char* end)
      : first_(first), next_(last), at_(at), end_(end) {}

  // How often four more can be put whatever they are: four codes and what is left over take up to six bytes, and each
  // time eight are written.
  std::size_t rounds() const {
    const auto bytes = static_cast<std::size_t>(end_ - at_);
    return std::min(static_cast<std::size_t>(next_ - first_) / 4, bytes < 8 ? 0 : (bytes - 2) / 6);
  }
  void put_four(const Code& code) {
    // In pairs, which do not wait for each other.
    const std::uint32_t a = code.entry[next_[-1]];
    const std::uint32_t b = code.entry[next_[-2]];
    const std::uint32_t c = code.entry[next_[-3]];
    const std::uint32_t d = code.entry[next_[-4]];
    const std::uint64_t low = bits_of(a) | bits_of(b) << length_of(a);
    const std::uint64_t high = bits_of(c) | bits_of(d) << length_of(c);
    const unsigned low_length = length_of(a) + length_of(b);
    bits_ |= (low | high << low_length) << count_;
    count_ += low_length + length_of(c) + length_of(d);
    next_ -= 4;
    store(at_, bits_);
    at_ += count_ / 8;
    bits_ >>= count_ & ~7u;
    count_ &= 7;
  }
  void finish(const Code& code) {
    while (next_ != first_) {
      put(code.entry[*--next_]);
      flush();
    }
    put(1 << 8 | 1);
    flush();
    if (count_ != 0) *at_ = static_cast<unsigned char>(bits_);
  }

 private:
  void put(std::uint32_t entry) {
    bits_ |= bits_of(entry) << count_;
    count_ += length_of(entry);
  }
  void flush() {
    for (; count_ >= 8; count_ -= 8, bits_ >>= 8) *at_++ = static_cast<unsigned char>(bits_);
  }

  const unsigned char* first_;
  const unsigned char* next_;
  unsigned char* at_;
  unsigned char* end_;
  std::uint64_t bits_ = 0;
  unsigned count_ = 0;
};

unsigned char* put_number(unsigned char* to, std::uint64_t value, unsigned bytes) noexcept {
  for (unsigned byte = 0; byte < bytes; ++byte) *to++ = static_cast<unsigned char>(value >> 8 * byte);
  return to;
}

// The highest symbol's weight follows from the others.
unsigned char* put_weights(unsigned char* to, const unsigned char* lengths, unsigned longest, unsigned highest) noexcept {
  const auto weight = [&](unsigned symbol) {
    return symbol >= highest || lengths[symbol] == 0 ? 0u : longest + 1 - lengths[symbol];
  };
  *to++ = static_cast<unsigned char>(127 + highest);
  for (unsigned symbol = 0; symbol < highest; symbol += 2) {
    *to++ = static_cast<unsigned char>(weight(symbol) << 4 | weight(symbol + 1));
  }
  return to;
}

// Returns what is behind the block; `to` if the code does not pay.
unsigned char* put_compressed(const unsigned char* data, std::size_t size, const Counts& counts, unsigned highest,
                              unsigned char* to) noexcept {
  unsigned char lengths[kHighest + 1];
  const unsigned longest = code_lengths(counts, lengths);
  std::size_t stream_bytes[kStreams];
  std::size_t sum = 0;
  for (std::size_t s = 0; s < kStreams; ++s) {
    std::size_t bits = 0;
    for (unsigned symbol = 0; symbol <= highest; ++symbol) bits += counts.of[s][symbol] * std::size_t{lengths[symbol]};
    stream_bytes[s] = bits / 8 + 1;
    sum += stream_bytes[s];
  }
  if (sum + kOverhead >= size) return to;
  Code code;
  make_code(lengths, longest, code);
  unsigned char* const literals = to + 5;
  unsigned char* at = put_weights(literals, lengths, longest, highest);
  for (std::size_t s = 0; s + 1 < kStreams; ++s) at = put_number(at, stream_bytes[s], 2);
  const std::size_t step = quarter(size);
  const auto stream = [&](std::size_t s) {
    unsigned char* const begin = at;
    at += stream_bytes[s];
    return Stream(data + s * step, data + std::min(size, (s + 1) * step), begin, at);
  };
  Stream a = stream(0);
  Stream b = stream(1);
  Stream c = stream(2);
  Stream d = stream(3);
  // Side by side, so that the processor has four chains of work at a time.
  while (const std::size_t rounds = std::min({a.rounds(), b.rounds(), c.rounds(), d.rounds()})) {
    for (std::size_t round = 0; round < rounds; ++round) {
      a.put_four(code);
      b.put_four(code);
      c.put_four(code);
      d.put_four(code);
    }
  }
  // Copies, so that the four have no address, and stay in registers above.
  for (Stream each : {a, b, c, d}) each.finish(code);
  put_number(to, 2 | 3 << 2 | size << 4 | static_cast<std::uint64_t>(at - literals) << 22, 5);
  *at++ = 0;  // no sequences
  return at;
}

// Returns what is behind the block, or null if a byte is above the highest.
unsigned char* put_block(const unsigned char* data, std::size_t size, bool is_last, unsigned char* to) noexcept {
  const auto head = [&](std::uint32_t kind, std::size_t block_bytes) {
    put_number(to, is_last | kind << 1 | block_bytes << 3, 3);
  };
  Counts counts;
  if (size >= kLeastForCode) {
    if (!count_bytes(data, size, counts)) return nullptr;
    unsigned highest = kHighest;
    while (counts.total[highest] == 0) --highest;
    if (counts.total[highest] == size) {
      head(kRepeated, size);
      to[3] = data[0];
      return to + 4;
    }
    unsigned char* const end = put_compressed(data, size, counts, highest, to + 3);
    if (end != to + 3) {
      head(kCompressed, static_cast<std::size_t>(end - to - 3));
      return end;
    }
  }
  head(kRaw, size);
  if (size != 0) std::memcpy(to + 3, data, size);
  return to + 3 + size;
}

}  // namespace

std::size_t compress_literals(const unsigned char* data, std::size_t size, unsigned char* frame) noexcept {
  // Magic; a content size of four bytes and no checksum; a window of 2^17 bytes.
  unsigned char* to = put_number(frame, 0x3880FD2FB528, 6);
  to = put_number(to, size, 4);
  std::size_t begin = 0;
  do {
    const std::size_t block = std::min(size - begin, kLiteralBlock);
    to = put_block(data + begin, block, begin + block == size, to);
    if (to == nullptr) return 0;
    begin += block;
  } while (begin != size);
  return static_cast<std::size_t>(to - frame);
}

}  // namespace syncline
