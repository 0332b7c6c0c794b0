// Any positions through any block: each is mapped to where the axes, one after the other, say, or left out.
// For libFuzzer, or standalone.cc.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "kernels.h"
#include "source.h"

using namespace syncline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const std::uint64_t first = in.number(50);
  const std::uint64_t other = in.word<std::uint32_t>();
  std::map<std::uint64_t, std::uint64_t> held{{first, other}};
  std::vector<Axis> axes;
  std::uint64_t span = 1;
  for (unsigned left = 1 + in.number(4); left > 0; --left) {
    const Axis axis{span + in.number(4), 1 + in.number(5), in.number(60)};
    axes.insert(axes.begin(), axis);
    span = std::max(axis.stride, span + (axis.count - 1) * axis.stride);
    const auto before = held;
    for (std::uint64_t i = 1; i < axis.count; ++i) {
      for (const auto& [here, there] : before) held[here + i * axis.stride] = there + i * axis.other;
    }
  }
  const bool is_far = in.number(8) == 0;
  auto positions = in.list<std::uint64_t>(in.size() / 8);
  for (auto& position : positions) position = is_far ? position : position % 1000;
  const auto bits = in.list(positions.size());
  std::vector<std::uint64_t> mapped(positions.size());
  std::vector<unsigned char> moved(positions.size());
  const std::size_t found = map_positions({positions.data(), bits.data(), positions.size(), axes.data(), axes.size(),
                                           first, other, mapped.data(), moved.data()},
                                          1);
  std::size_t next = 0;
  for (const std::uint64_t position : positions) {
    const auto place = held.find(position);
    if (place == held.end()) continue;
    if (next == found || mapped[next] != place->second) std::abort();
    ++next;
  }
  if (next != found) std::abort();
  return 0;
}
