// Positions through a block, the same on every instruction set. Neighbours mostly lie in one stretch of the innermost
// axis, so that the divisions are made about once a stretch, or once a hole between stretches.
#include <algorithm>

#include "table.h"

namespace syncline {
namespace {

constexpr std::uint64_t kEndless = ~std::uint64_t{0};

// Consecutive positions that are all in one stretch, or all in one hole.
struct Stretch {
  std::uint64_t begin, length;
  bool is_inside;
  std::uint64_t target;  // where `begin` is on the other side
};

// Numbers wrap: a position before `first` is far beyond the last one.
Stretch stretch_of(std::uint64_t position, const MapTask& task, std::uint64_t stretch_length) noexcept {
  std::uint64_t rest = position - task.first;
  std::uint64_t target = task.other;
  std::uint64_t room = kEndless;  // from where `rest` counts up to the next element of the axes so far
  const auto hole = [&](std::uint64_t used) {
    if (room == kEndless) return Stretch{position, 1, false, 0};
    return Stretch{position - rest + used, room - used, false, 0};
  };
  for (std::size_t k = 0; k + 1 < task.axis_count; ++k) {
    const Axis& axis = task.axes[k];
    const std::uint64_t index = rest / axis.stride;
    if (index >= axis.count) return hole(axis.count * axis.stride);
    rest -= index * axis.stride;
    target += index * axis.other;
    room = room == kEndless ? axis.stride : std::min(room - index * axis.stride, axis.stride);
  }
  if (rest >= stretch_length) return hole(stretch_length);
  return {position - rest, stretch_length, true, target};
}

template <std::size_t W>
std::size_t map_width(const MapTask& task) noexcept {
  const Axis inner = task.axes[task.axis_count - 1];
  const std::uint64_t stretch_length = (inner.count - 1) * inner.stride + 1;
  Stretch here{0, 0, false, 0};
  std::size_t found = 0;
  for (std::size_t i = 0; i < task.count; ++i) {
    const std::uint64_t position = task.positions[i];
    if (position - here.begin >= here.length) here = stretch_of(position, task, stretch_length);
    if (!here.is_inside) continue;
    std::uint64_t index = position - here.begin;
    if (inner.stride != 1) {
      const std::uint64_t offset = index;
      index = offset / inner.stride;
      if (index * inner.stride != offset) continue;
    }
    task.mapped[found] = here.target + index * inner.other;
    store(task.moved + found * W, load<Unit<W>>(task.bits + i * W));
    ++found;
  }
  return found;
}

}  // namespace

std::size_t map_positions(const MapTask& task, unsigned unit_bytes) noexcept {
  return with_width(unit_bytes, [&](auto width) { return map_width<width()>(task); });
}

}  // namespace syncline
