// What Python sees of the kernels: buffers are looked up, the GIL is let go, a status goes back. No loops.
//
// Lengths, widths and contiguity were checked in src/syncline/kernels/__init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <optional>
#include <utility>

#include "kernels.h"
#include "literals.h"
#include "view.h"

namespace nb = nanobind;

namespace syncline {
void bind_tight(nanobind::module_& module);  // bind_tight.cc
}

namespace {

using namespace syncline;

// Also what the changes add to the fingerprint of a tensor in which unit 0 is unit `start`, if there are seeds.
nb::tuple find_changes_(nb::handle old_bits, nb::handle new_bits, std::size_t begin, unsigned unit_bytes, bool refresh,
                nb::handle offsets, nb::handle changed_old, nb::handle changed_new, std::size_t room,
                std::uint64_t start, std::optional<std::pair<std::uint64_t, std::uint64_t>> seeds) {
  const View old_view(old_bits, refresh);
  const View new_view(new_bits, false);
  const View places(offsets, true);
  const View olds(changed_old, true);
  const View news(changed_new, true);
  Progress progress;
  Lanes rise{0, 0};
  {
    const nb::gil_scoped_release unlocked;
    progress = diff({old_view.bytes(), new_view.bytes(), begin, old_view.size_bytes() / unit_bytes, refresh,
                     places.offsets(), olds.bytes(), news.bytes(), room},
                    unit_bytes);
    if (seeds) {
      rise = fingerprint_change(places.offsets(), olds.bytes(), news.bytes(), progress.found, unit_bytes, start,
                                {seeds->first, seeds->second});
    }
  }
  return nb::make_tuple(progress.stop, progress.found, rise.a, rise.b);
}

bool scatter_(nb::handle target, nb::handle offsets, nb::handle bits, unsigned unit_bytes) {
  const View into(target, true);
  const View places(offsets, false);
  const View from(bits, false);
  const nb::gil_scoped_release unlocked;
  return scatter(into.bytes(), into.size_bytes() / unit_bytes, places.offsets(), from.bytes(),
                 places.size_bytes() / sizeof(std::uint32_t), unit_bytes)
             .status == Status::ok;
}

bool gather_(nb::handle source, nb::handle offsets, nb::handle bits, unsigned unit_bytes) {
  const View from(source, false);
  const View places(offsets, false);
  const View into(bits, true);
  const nb::gil_scoped_release unlocked;
  return gather(from.bytes(), from.size_bytes() / unit_bytes, places.offsets(), into.bytes(),
                places.size_bytes() / sizeof(std::uint32_t), unit_bytes)
             .status == Status::ok;
}

// Returns the index of the first unit that differs; -1 if none does, -2 if an offset is out of range.
std::int64_t compare_(nb::handle source, nb::handle offsets, nb::handle bits, unsigned unit_bytes) {
  const View from(source, false);
  const View places(offsets, false);
  const View wanted(bits, false);
  const nb::gil_scoped_release unlocked;
  const Outcome outcome = compare(from.bytes(), from.size_bytes() / unit_bytes, places.offsets(), wanted.bytes(),
                                  places.size_bytes() / sizeof(std::uint32_t), unit_bytes);
  if (outcome.status == Status::ok) return -1;
  return outcome.status == Status::differs ? static_cast<std::int64_t>(outcome.position) : -2;
}

bool check_ascending_(nb::handle offsets, std::uint64_t limit) {
  const View places(offsets, false);
  return check_ascending(places.offsets(), places.size_bytes() / sizeof(std::uint32_t), limit).status == Status::ok;
}

nb::tuple fingerprint_(nb::handle bits, unsigned unit_bytes, std::uint64_t start, std::uint64_t seed_a,
                       std::uint64_t seed_b) {
  const View view(bits, false);
  Lanes total;
  {
    const nb::gil_scoped_release unlocked;
    total = fingerprint(view.bytes(), view.size_bytes() / unit_bytes, unit_bytes, start, {seed_a, seed_b});
  }
  return nb::make_tuple(total.a, total.b);
}

nb::tuple fingerprint_change_(nb::handle offsets, nb::handle old_bits, nb::handle new_bits, unsigned unit_bytes,
                              std::uint64_t start, std::uint64_t seed_a, std::uint64_t seed_b) {
  const View places(offsets, false);
  const View olds(old_bits, false);
  const View news(new_bits, false);
  Lanes total;
  {
    const nb::gil_scoped_release unlocked;
    total = fingerprint_change(places.offsets(), olds.bytes(), news.bytes(),
                               places.size_bytes() / sizeof(std::uint32_t), unit_bytes, start, {seed_a, seed_b});
  }
  return nb::make_tuple(total.a, total.b);
}

// Returns how much of `high` is used; -1 if the offsets do not rise.
std::int64_t encode_gaps_(nb::handle offsets, unsigned low_bytes, nb::handle low, nb::handle high) {
  const View places(offsets, false);
  const View lows(low, true);
  const View highs(high, true);
  std::size_t used = 0;
  const nb::gil_scoped_release unlocked;
  const Outcome outcome = encode_gaps(places.offsets(), places.size_bytes() / sizeof(std::uint32_t), low_bytes,
                                      lows.bytes(), highs.bytes(), &used);
  return outcome.status == Status::ok ? static_cast<std::int64_t>(used) : -1;
}

bool decode_gaps_(nb::handle low, unsigned low_bytes, nb::handle high, std::uint64_t limit, nb::handle offsets) {
  const View lows(low, false);
  const View highs(high, false);
  const View places(offsets, true);
  const nb::gil_scoped_release unlocked;
  return decode_gaps(lows.bytes(), low_bytes, highs.bytes(), highs.size_bytes(), limit, places.offsets(),
                     places.size_bytes() / sizeof(std::uint32_t))
             .status == Status::ok;
}

nb::tuple write_symbols_(nb::handle old_bits, nb::handle new_bits, unsigned unit_bytes, bool is_step,
                         nb::handle symbols, nb::handle excess) {
  const View olds(old_bits, false);
  const View news(new_bits, false);
  const View packed(symbols, true);
  const View more(excess, true);
  SymbolCounts counts;
  {
    const nb::gil_scoped_release unlocked;
    counts = write_symbols(olds.bytes(), news.bytes(), olds.size_bytes() / unit_bytes, unit_bytes, is_step,
                           packed.bytes(), more.bytes());
  }
  return nb::make_tuple(counts.bits, counts.escaped);
}

bool read_symbols_(nb::handle old_bits, unsigned unit_bytes, bool is_step, nb::handle symbols, unsigned bits,
                   nb::handle excess, nb::handle new_bits) {
  const View olds(old_bits, false);
  const View packed(symbols, false);
  const View more(excess, false);
  const View news(new_bits, true);
  const nb::gil_scoped_release unlocked;
  return read_symbols(olds.bytes(), olds.size_bytes() / unit_bytes, unit_bytes, is_step, packed.bytes(), bits,
                      more.bytes(), more.size_bytes() / unit_bytes, news.bytes());
}

// `encode_gaps` and `write_symbols` in one call: how much of `high` is used, bits of a symbol, escaped; -1 as there.
nb::tuple write_changes_(nb::handle offsets, unsigned low_bytes, nb::handle low, nb::handle high, nb::handle old_bits,
                         nb::handle new_bits, unsigned unit_bytes, bool is_step, nb::handle symbols,
                         nb::handle excess) {
  const View places(offsets, false);
  const View lows(low, true);
  const View highs(high, true);
  const View olds(old_bits, false);
  const View news(new_bits, false);
  const View packed(symbols, true);
  const View more(excess, true);
  const std::size_t count = places.size_bytes() / sizeof(std::uint32_t);
  std::size_t used = 0;
  Outcome outcome;
  SymbolCounts counts{0, 0};
  {
    const nb::gil_scoped_release unlocked;
    outcome = encode_gaps(places.offsets(), count, low_bytes, lows.bytes(), highs.bytes(), &used);
    if (outcome.status == Status::ok) {
      counts = write_symbols(olds.bytes(), news.bytes(), count, unit_bytes, is_step, packed.bytes(), more.bytes());
    }
  }
  const auto high_bytes = outcome.status == Status::ok ? static_cast<std::int64_t>(used) : -1;
  return nb::make_tuple(high_bytes, counts.bits, counts.escaped);
}

// `decode_gaps`, `gather` of the base at these places, and `read_symbols` in one call; false where one of them fails.
bool read_changes_(nb::handle low, unsigned low_bytes, nb::handle high, nb::handle base, unsigned unit_bytes,
                   bool is_step, nb::handle symbols, unsigned bits, nb::handle excess, nb::handle offsets,
                   nb::handle old_bits, nb::handle new_bits) {
  const View lows(low, false);
  const View highs(high, false);
  const View from(base, false);
  const View packed(symbols, false);
  const View more(excess, false);
  const View places(offsets, true);
  const View olds(old_bits, true);
  const View news(new_bits, true);
  const std::size_t limit = from.size_bytes() / unit_bytes;
  const std::size_t count = places.size_bytes() / sizeof(std::uint32_t);
  const nb::gil_scoped_release unlocked;
  return decode_gaps(lows.bytes(), low_bytes, highs.bytes(), highs.size_bytes(), limit, places.offsets(), count)
                 .status == Status::ok &&
         gather(from.bytes(), limit, places.offsets(), olds.bytes(), count, unit_bytes).status == Status::ok &&
         read_symbols(olds.bytes(), count, unit_bytes, is_step, packed.bytes(), bits, more.bytes(),
                      more.size_bytes() / unit_bytes, news.bytes());
}

void xor_(nb::handle a, nb::handle b, nb::handle out) {
  const View left(a, false);
  const View right(b, false);
  const View into(out, true);
  const nb::gil_scoped_release unlocked;
  xor_bytes(left.bytes(), right.bytes(), into.bytes(), into.size_bytes());
}

void split_planes_(nb::handle units, unsigned unit_bytes, bool rotated, nb::handle planes) {
  const View from(units, false);
  const View into(planes, true);
  const nb::gil_scoped_release unlocked;
  split_planes(from.bytes(), from.size_bytes() / unit_bytes, unit_bytes, rotated, into.bytes());
}

void join_planes_(nb::sequence planes, unsigned unit_bytes, bool rotated, nb::handle units) {
  const View into(units, true);
  std::deque<View> views;  // a view stays where it was made
  std::vector<const unsigned char*> from;
  for (const nb::handle plane : planes) from.push_back(views.emplace_back(plane, false).bytes());
  const nb::gil_scoped_release unlocked;
  join_planes(from.data(), into.size_bytes() / unit_bytes, unit_bytes, rotated, into.bytes());
}

std::size_t map_positions_(nb::handle positions, nb::handle bits, unsigned unit_bytes, nb::handle axes,
                           std::uint64_t first, std::uint64_t other, nb::handle mapped, nb::handle moved) {
  const View places(positions, false);
  const View from(bits, false);
  const View sides(axes, false);
  const View targets(mapped, true);
  const View into(moved, true);
  const nb::gil_scoped_release unlocked;
  return map_positions({places.as<std::uint64_t>(), from.bytes(), places.size_bytes() / sizeof(std::uint64_t),
                        sides.as<Axis>(), sides.size_bytes() / sizeof(Axis), first, other, targets.as<std::uint64_t>(),
                        into.bytes()},
                       unit_bytes);
}

// Returns how much of `frame` is used; 0 if a byte is above 128.
std::size_t compress_literals_(nb::handle data, nb::handle frame) {
  const View from(data, false);
  const View into(frame, true);
  const nb::gil_scoped_release unlocked;
  return compress_literals(from.bytes(), from.size_bytes(), into.bytes());
}

std::uint64_t read_words_(nb::handle first, nb::handle second) {
  const View a(first, false);
  const View b(second, false);
  const nb::gil_scoped_release unlocked;
  return read_words(a.bytes(), b.bytes(), (a.size_bytes() < b.size_bytes() ? a : b).size_bytes() / 8 * 8);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (isa_available(static_cast<Isa>(isa))) found.emplace_back(isa_name(static_cast<Isa>(isa)));
  }
  return found;
}

bool select_isa_(const std::string& name) {
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (name == isa_name(static_cast<Isa>(isa))) return select_isa(static_cast<Isa>(isa));
  }
  return false;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels in C++; call them through syncline.kernels, which checks arguments.";
  m.def("find_changes", &find_changes_);
  m.def("scatter", &scatter_);
  m.def("gather", &gather_);
  m.def("compare", &compare_);
  m.def("check_ascending", &check_ascending_);
  m.def("fingerprint", &fingerprint_);
  m.def("fingerprint_change", &fingerprint_change_);
  m.def("encode_gaps", &encode_gaps_);
  m.def("decode_gaps", &decode_gaps_);
  m.def("write_changes", &write_changes_);
  m.def("read_changes", &read_changes_);
  m.def("write_symbols", &write_symbols_);
  m.def("read_symbols", &read_symbols_);
  m.def("split_planes", &split_planes_);
  m.def("join_planes", &join_planes_);
  m.def("map_positions", &map_positions_);
  m.def("compress_literals", &compress_literals_);
  m.def("literals_room", &frame_room);
  m.def("read_words", &read_words_);
  m.def("xor", &xor_);
  m.def("available_isas", &available_isas);
  m.def("select_isa", &select_isa_);
  m.def("selected_isa", [] { return std::string(isa_name(selected_isa())); });
  bind_tight(m);
}
