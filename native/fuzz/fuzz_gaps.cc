// Any bytes as gap bytes: refused, or ascending offsets below the limit. For libFuzzer, or standalone.cc.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 8) return 0;
  std::uint32_t limit = 0;
  std::uint16_t announced = 0;
  std::memcpy(&limit, data, sizeof limit);
  std::memcpy(&announced, data + 4, sizeof announced);
  const unsigned low_bytes = data[6] % 3;
  const std::size_t count = announced % 300;
  data += 8;
  size -= 8;
  if (size < low_bytes * count) return 0;
  // Copies of exact size, so that a sanitizer sees an over-read.
  std::unique_ptr<unsigned char[]> low(new unsigned char[low_bytes * count]);
  std::unique_ptr<unsigned char[]> high(new unsigned char[size - low_bytes * count]);
  std::memcpy(low.get(), data, low_bytes * count);
  std::memcpy(high.get(), data + low_bytes * count, size - low_bytes * count);
  std::unique_ptr<std::uint32_t[]> offsets(new std::uint32_t[count]);
  const auto outcome =
      syncline::decode_gaps(low.get(), low_bytes, high.get(), size - low_bytes * count, limit, offsets.get(), count);
  if (outcome.status != syncline::Status::ok) return 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (offsets[i] >= limit || (i != 0 && offsets[i] <= offsets[i - 1])) std::abort();
  }
  return 0;
}
