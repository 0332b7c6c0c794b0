// Any offsets: a scatter refuses them and writes nothing, or what it wrote is gathered again; gaps are made of them only
// if they rise. For libFuzzer, or standalone.cc.
#include <algorithm>
#include <cstdlib>

#include "kernels.h"
#include "source.h"

using namespace syncline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const unsigned unit_bytes = 1u << in.number(4);
  const std::size_t target_count = in.number(400);
  const std::size_t count = in.number(100);
  const bool is_narrow = in.number(4) != 0;
  auto offsets = in.list<std::uint32_t>(count);
  if (is_narrow) {
    for (auto& offset : offsets) offset %= 500;
  }
  const auto bits = in.list(count * unit_bytes);
  auto target = in.list(target_count * unit_bytes);
  const auto before = target;
  const Outcome written = scatter(target.data(), target_count, offsets.data(), bits.data(), count, unit_bytes);
  const auto inside = [&](std::uint32_t offset) { return offset < target_count; };
  const bool is_legal = std::all_of(offsets.begin(), offsets.end(), inside);
  if (is_legal != (written.status == Status::ok) || (!is_legal && target != before)) std::abort();
  std::vector<unsigned char> found(count * unit_bytes);
  const Outcome read = gather(target.data(), target_count, offsets.data(), found.data(), count, unit_bytes);
  if (read.status != written.status) std::abort();
  // Of changes in one place the last counts, so only lists without repetitions come back whole.
  auto sorted = offsets;
  std::sort(sorted.begin(), sorted.end());
  const bool is_single = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  if (is_legal && is_single && found != bits) std::abort();
  const std::size_t most = count + (count != 0 ? offsets.back() / 255 : 0);
  if (most > 1u << 16) return 0;
  std::vector<unsigned char> high(most);
  std::size_t used = 0;
  const Outcome gaps = encode_gaps(offsets.data(), count, 0, nullptr, high.data(), &used);
  if ((gaps.status == Status::ok) != (is_single && sorted == offsets)) std::abort();
  return 0;
}
