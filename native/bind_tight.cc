// Glue for the kernels of `tight`; `syncline.kernels.tight_native` has checked lengths and maps the status.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "tight.h"

namespace nb = nanobind;

namespace syncline {
namespace {

template <typename Word>
using In = nb::ndarray<const Word, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename Word>
using Out = nb::ndarray<Word, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Bytes = In<std::uint8_t>;
using Numbers = In<std::uint32_t>;

constexpr std::size_t kEntryNumbers = sizeof(ClassEntry) / sizeof(std::uint32_t);
static_assert(kEntryNumbers == 9 && sizeof(ClassMap) == 16);

const ClassMap& map_of(const Numbers& numbers) { return *reinterpret_cast<const ClassMap*>(numbers.data()); }
const ClassEntry* entries_of(const Numbers& numbers) {
  return reinterpret_cast<const ClassEntry*>(numbers.data());
}
unsigned classes_of(const Numbers& entries) { return static_cast<unsigned>(entries.size() / kEntryNumbers); }

nb::tuple answer(const TightOutcome& outcome) {
  return nb::make_tuple(static_cast<int>(outcome.status), outcome.index, outcome.value);
}

nb::tuple rank(const Bytes& units, const Numbers& offsets, const Bytes& old_bits, unsigned unit_bytes,
               const Numbers& map, const Out<std::uint64_t>& members, const Out<std::uint64_t>& changes,
               const Out<std::uint32_t>& ranks, const Out<std::uint32_t>& order) {
  const RankTask task{units.data(),    units.size() / unit_bytes, offsets.data(), old_bits.data(), offsets.size(),
                      map_of(map),     members.data(),            changes.data(), ranks.data(),    order.data()};
  TightOutcome outcome;
  {
    nb::gil_scoped_release released;
    outcome = rank_changes(task, unit_bytes);
  }
  return answer(outcome);
}

nb::tuple find(const Bytes& base, unsigned unit_bytes, const Numbers& map, const Numbers& entries,
               const Numbers& marks, const Out<std::uint32_t>& offsets, const Out<std::uint32_t>& order,
               const Out<std::uint8_t>& old_bits) {
  const FindTask task{base.data(),  base.size() / unit_bytes, map_of(map),  entries_of(entries),
                      marks.data(), offsets.data(),           order.data(), old_bits.data()};
  TightOutcome outcome;
  {
    nb::gil_scoped_release released;
    outcome = find_changes(task, unit_bytes);
  }
  return answer(outcome);
}

nb::tuple write(const Numbers& entries, const Numbers& marks, const Bytes& zigzag, unsigned unit_bytes,
                const Out<std::uint8_t>& unary, const Out<std::uint8_t>& fields) {
  std::size_t unary_bytes = 0;
  std::size_t field_bytes = 0;
  {
    nb::gil_scoped_release released;
    write_lists(entries_of(entries), classes_of(entries), marks.data(), zigzag.data(), unit_bytes, unary.data(),
                fields.data(), &unary_bytes, &field_bytes);
  }
  return nb::make_tuple(unary_bytes, field_bytes);
}

nb::tuple read(const Numbers& entries, const Bytes& unary, const Bytes& fields, std::uint64_t limit,
               unsigned unit_bytes, const Out<std::uint32_t>& marks, const Out<std::uint8_t>& zigzag) {
  TightOutcome outcome;
  {
    nb::gil_scoped_release released;
    outcome = read_lists(entries_of(entries), classes_of(entries), unary.data(), unary.size(), fields.data(),
                         fields.size(), limit, unit_bytes, marks.data(), zigzag.data());
  }
  return answer(outcome);
}

}  // namespace

void bind_tight(nb::module_& module) {
  module.def("tight_rank", &rank);
  module.def("tight_find", &find);
  module.def("tight_write", &write);
  module.def("tight_read", &read);
}

}  // namespace syncline
