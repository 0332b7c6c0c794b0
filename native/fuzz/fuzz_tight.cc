// Any bytes as the lists and the base of a window of `tight`: refused, or changes inside the window that rise.
// For libFuzzer, or standalone.cc.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"
#include "source.h"
#include "tight.h"

namespace {

using namespace syncline;

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
  const std::uint32_t units = in.number(1100);
  const ClassMap map{in.number(8 * unit_bytes), in.number(2048), in.number(2048), 1 + in.number(kMaxClasses)};
  select_isa(static_cast<Isa>(in.number(kIsaCount)));
  std::vector<ClassEntry> entries;
  std::size_t marks = 0;
  std::size_t changes = 0;
  for (std::uint32_t c = 0; c < map.count; ++c) {
    entries.push_back(in.number(2) == 0 ? ClassEntry{} : read_entry(in, units, unit_bytes));
    marks += entries.back().marks;
    changes += entries.back().changes;
  }
  const auto base = in.list(units * unit_bytes);
  const auto unary = in.list(in.number(static_cast<std::uint32_t>(in.size()) + 1));
  const auto fields = in.list(in.size());
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
