// Any bytes as gap bytes: refused, or ascending offsets below the limit, which are what they are made of again.
// For libFuzzer, or standalone.cc.
#include <cstdlib>
#include <memory>

#include "kernels.h"
#include "source.h"

using namespace syncline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const auto limit = in.word<std::uint32_t>();
  const std::size_t count = in.number(300);
  const unsigned low_bytes = in.number(3);
  const auto low = in.list(low_bytes * count);
  const auto high = in.list(in.size());
  std::unique_ptr<std::uint32_t[]> offsets(new std::uint32_t[count]);
  const auto outcome = decode_gaps(low.data(), low_bytes, high.data(), high.size(), limit, offsets.get(), count);
  if (outcome.status != Status::ok) return 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (offsets[i] >= limit || (i != 0 && offsets[i] <= offsets[i - 1])) std::abort();
  }
  const std::size_t most = count + (count != 0 ? (offsets[count - 1] >> 8 * low_bytes) / 255 : 0);
  std::vector<unsigned char> low_again(low.size());
  std::vector<unsigned char> high_again(most);
  std::size_t used = 0;
  encode_gaps(offsets.get(), count, low_bytes, low_again.data(), high_again.data(), &used);
  high_again.resize(used);
  if (low_again != low || high_again != high) std::abort();
  return 0;
}
