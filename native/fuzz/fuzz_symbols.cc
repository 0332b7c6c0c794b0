// Any bytes as the values of a window of `packed`: refused, or new bits that all differ from the old; and these, written
// again, are read as the same. For libFuzzer, or standalone.cc.
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "source.h"

using namespace syncline;

namespace {

constexpr unsigned kSymbolBits[] = {1, 2, 4, 8};

// The excess is made to fit most of the time, or hardly any input would be read.
std::size_t escapes_of(const std::vector<unsigned char>& symbols, std::size_t count, unsigned bits) {
  const unsigned escape = (1u << bits) - 1;
  std::size_t escaped = 0;
  for (std::size_t i = 0; i < count; ++i) escaped += (symbols[i * bits / 8] >> (i * bits % 8) & escape) == escape;
  return escaped;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const unsigned unit_bytes = 1u << in.number(4);
  const bool is_step = in.number(2) != 0;
  const unsigned bits = kSymbolBits[in.number(4)];
  const std::size_t count = 1 + in.number(200);
  const bool fits = in.number(8) != 0;
  const auto symbols = in.list((count * bits + 7) / 8);
  const std::size_t escaped = fits ? escapes_of(symbols, count, bits) : in.number(200);
  const auto excess = in.list(escaped * unit_bytes);
  const auto old_bits = in.list(count * unit_bytes);
  std::vector<unsigned char> new_bits(count * unit_bytes);
  if (!read_symbols(old_bits.data(), count, unit_bytes, is_step, symbols.data(), bits, excess.data(), escaped,
                    new_bits.data())) {
    return 0;
  }
  for (std::size_t i = 0; i < count * unit_bytes; i += unit_bytes) {
    if (std::memcmp(&old_bits[i], &new_bits[i], unit_bytes) == 0) std::abort();
  }
  std::vector<unsigned char> symbols_again(count);
  std::vector<unsigned char> excess_again((count + 1) * unit_bytes);
  std::vector<unsigned char> new_again(count * unit_bytes);
  const SymbolCounts counts = write_symbols(old_bits.data(), new_bits.data(), count, unit_bytes, is_step,
                                            symbols_again.data(), excess_again.data());
  if (!read_symbols(old_bits.data(), count, unit_bytes, is_step, symbols_again.data(), counts.bits, excess_again.data(),
                    counts.escaped, new_again.data()) ||
      new_again != new_bits) {
    std::abort();
  }
  return 0;
}
