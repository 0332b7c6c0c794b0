// What Python sees of the kernels of `tight`; src/syncline/kernels/tight.py has checked the arguments.
#include "tight.h"
#include "view.h"

namespace nb = nanobind;

namespace syncline {
namespace {

constexpr std::size_t kEntryBytes = sizeof(ClassEntry);
static_assert(kEntryBytes == 9 * sizeof(std::uint32_t) && sizeof(ClassMap) == 4 * sizeof(std::uint32_t));

nb::tuple answer(const TightOutcome& outcome) {
  return nb::make_tuple(static_cast<int>(outcome.status), outcome.index, outcome.value);
}

nb::tuple tight_rank_(nb::handle units, nb::handle offsets, nb::handle old_bits, unsigned unit_bytes, nb::handle map,
                      nb::handle members, nb::handle changes, nb::handle ranks, nb::handle order) {
  const View fresh(units, false);
  const View places(offsets, false);
  const View olds(old_bits, false);
  const View classes(map, false);
  const View members_of(members, true);
  const View changes_of(changes, true);
  const View ranked(ranks, true);
  const View ordered(order, true);
  const RankTask task{fresh.bytes(),
                      fresh.size_bytes() / unit_bytes,
                      places.offsets(),
                      olds.bytes(),
                      places.size_bytes() / sizeof(std::uint32_t),
                      *classes.as<ClassMap>(),
                      members_of.as<std::uint64_t>(),
                      changes_of.as<std::uint64_t>(),
                      ranked.offsets(),
                      ordered.offsets()};
  TightOutcome outcome;
  {
    const nb::gil_scoped_release unlocked;
    outcome = rank_changes(task, unit_bytes);
  }
  return answer(outcome);
}

nb::tuple tight_find_(nb::handle base, unsigned unit_bytes, nb::handle map, nb::handle entries, nb::handle marks,
                      nb::handle offsets, nb::handle order, nb::handle old_bits) {
  const View held(base, false);
  const View classes(map, false);
  const View described(entries, false);
  const View marked(marks, false);
  const View places(offsets, true);
  const View ordered(order, true);
  const View olds(old_bits, true);
  const FindTask task{held.bytes(),
                      held.size_bytes() / unit_bytes,
                      *classes.as<ClassMap>(),
                      described.as<ClassEntry>(),
                      marked.offsets(),
                      places.offsets(),
                      ordered.offsets(),
                      olds.bytes()};
  TightOutcome outcome;
  {
    const nb::gil_scoped_release unlocked;
    outcome = find_changes(task, unit_bytes);
  }
  return answer(outcome);
}

nb::tuple tight_write_(nb::handle entries, nb::handle marks, nb::handle zigzag, unsigned unit_bytes, nb::handle unary,
                       nb::handle fields) {
  const View described(entries, false);
  const View marked(marks, false);
  const View steps(zigzag, false);
  const View ones(unary, true);
  const View lows(fields, true);
  std::size_t unary_bytes = 0;
  std::size_t field_bytes = 0;
  {
    const nb::gil_scoped_release unlocked;
    write_lists(described.as<ClassEntry>(), static_cast<unsigned>(described.size_bytes() / kEntryBytes),
                marked.offsets(), steps.bytes(), unit_bytes, ones.bytes(), lows.bytes(), &unary_bytes, &field_bytes);
  }
  return nb::make_tuple(unary_bytes, field_bytes);
}

nb::tuple tight_read_(nb::handle entries, nb::handle unary, nb::handle fields, std::uint64_t limit, unsigned unit_bytes,
                      nb::handle marks, nb::handle zigzag) {
  const View described(entries, false);
  const View ones(unary, false);
  const View lows(fields, false);
  const View marked(marks, true);
  const View steps(zigzag, true);
  TightOutcome outcome;
  {
    const nb::gil_scoped_release unlocked;
    outcome = read_lists(described.as<ClassEntry>(), static_cast<unsigned>(described.size_bytes() / kEntryBytes),
                         ones.bytes(), ones.size_bytes(), lows.bytes(), lows.size_bytes(), limit, unit_bytes,
                         marked.offsets(), steps.bytes());
  }
  return answer(outcome);
}

}  // namespace

void bind_tight(nb::module_& module) {
  module.def("tight_rank", &tight_rank_);
  module.def("tight_find", &tight_find_);
  module.def("tight_write", &tight_write_);
  module.def("tight_read", &tight_read_);
}

}  // namespace syncline
