// Any bytes become a frame that fits into its room, or are refused for a byte above 128. Short inputs are repeated, so that
// blocks end where they will. For libFuzzer, or standalone.cc.
#include <algorithm>
#include <cstdlib>

#include "literals.h"
#include "source.h"

using namespace syncline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const std::size_t repeats = in.number(300) == 0 ? in.number(400) : in.number(3);
  const unsigned limit = 1 + in.number(256);
  const auto piece = in.list(in.size());
  std::vector<unsigned char> content;
  for (std::size_t i = 0; i <= repeats; ++i) content.insert(content.end(), piece.begin(), piece.end());
  for (auto& byte : content) byte = static_cast<unsigned char>(byte % limit);
  content.shrink_to_fit();
  std::vector<unsigned char> frame(frame_room(content.size()));
  const std::size_t used = compress_literals(content.data(), content.size(), frame.data());
  const bool is_low = std::all_of(content.begin(), content.end(), [](unsigned char byte) { return byte <= 128; });
  if (used > frame.size() || (is_low && used == 0)) std::abort();
  return 0;
}
