// Any bytes as the lists and the base of a window of `tight`: refused, or changes inside the window that rise.
// For libFuzzer, or standalone.cc.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "tight.h"

namespace {

using namespace syncline;

// Takes numbers off the front; zeros when there is no more.
class Source {
 public:
  Source(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint32_t number(std::uint32_t limit) {
    std::uint16_t value = 0;
    const std::size_t size = size_ < sizeof value ? size_ : sizeof value;
    if (size != 0) std::memcpy(&value, data_, size);
    data_ += size;
    size_ -= size;
    return value % limit;
  }
  // Copies of exact size, so that a sanitizer sees an over-read.
  std::vector<unsigned char> bytes(std::size_t count) {
    std::vector<unsigned char> out(count);
    out.shrink_to_fit();
    const std::size_t size = size_ < count ? size_ : count;
    if (size != 0) std::memcpy(out.data(), data_, size);
    data_ += size;
    size_ -= size;
    return out;
  }
  std::size_t size() const { return size_; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

ClassEntry read_entry(Source& in, std::uint32_t units, unsigned unit_bytes) {
  ClassEntry entry{};
  entry.changes = in.number(units + 1);
  if (entry.changes == 0) return entry;
  entry.gap_bits = in.number(25);
  entry.unchanged_marked = in.number(2);
  entry.marks = entry.unchanged_marked != 0 ? in.number(units + 1) : entry.changes;
  entry.large = in.number(entry.changes + 1);
  if (entry.large == 0) return entry;
  entry.run_bits = in.number(25);
  entry.small_marked = in.number(2);
  entry.large_marks = entry.small_marked != 0 ? entry.changes - entry.large : entry.large;
  entry.excess_bits = in.number(8 * unit_bytes - 1);
  return entry;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Source in(data, size);
  const unsigned unit_bytes = 1u << in.number(4);
  const std::uint32_t units = in.number(200);
  const ClassMap map{in.number(8 * unit_bytes), in.number(256), in.number(256), 1 + in.number(kMaxClasses)};
  select_isa(static_cast<Isa>(in.number(kIsaCount)));
  std::vector<ClassEntry> entries;
  std::size_t marks = 0;
  std::size_t changes = 0;
  for (std::uint32_t c = 0; c < map.count; ++c) {
    entries.push_back(in.number(2) == 0 ? ClassEntry{} : read_entry(in, units, unit_bytes));
    marks += entries.back().marks;
    changes += entries.back().changes;
  }
  const auto base = in.bytes(units * unit_bytes);
  const auto unary = in.bytes(in.size() / 2);
  const auto fields = in.bytes(in.size());
  std::unique_ptr<std::uint32_t[]> marked(new std::uint32_t[marks]);
  std::unique_ptr<unsigned char[]> steps(new unsigned char[changes * unit_bytes]);
  const auto read = read_lists(entries.data(), map.count, unary.data(), unary.size(), fields.data(), fields.size(),
                               units, unit_bytes, marked.get(), steps.get());
  // Marks that rise are all that the next pass asks for; some are made up where the bits are refused.
  if (read.status != TightStatus::ok) {
    std::size_t next = 0;
    for (const auto& entry : entries) {
      for (std::uint32_t i = 0; i < entry.marks; ++i) marked[next++] = i + i / 3;
    }
  }
  std::unique_ptr<std::uint32_t[]> offsets(new std::uint32_t[changes]);
  std::unique_ptr<std::uint32_t[]> order(new std::uint32_t[changes]);
  std::unique_ptr<unsigned char[]> old_bits(new unsigned char[changes * unit_bytes]);
  const FindTask task{base.data(),  units,         map,         entries.data(),
                      marked.get(), offsets.get(), order.get(), old_bits.get()};
  if (find_changes(task, unit_bytes).status != TightStatus::ok) return 0;
  for (std::size_t i = 0; i < changes; ++i) {
    if (offsets[i] >= units || order[i] >= changes || (i != 0 && offsets[i] <= offsets[i - 1])) std::abort();
  }
  return 0;
}
