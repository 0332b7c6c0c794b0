// Every instruction set against the scalar one and against a plain restatement of the format, over random
// windows; then damaged bits, which must be refused or stay inside what the caller owns. Arrays are exactly as
// long as the kernels may touch, so that the address sanitizer sees every step beyond.
//
//   test_tight [rounds] [seed]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"
#include "tight.h"

namespace {

using namespace syncline;
using Bytes = std::vector<unsigned char>;

std::mt19937_64 random_bits;

std::uint64_t below(std::uint64_t limit) {
  return random_bits() % limit;
}

[[noreturn]] void fail(const char* what, int line) {
  std::fprintf(stderr, "line %d: %s\n", line, what);
  std::exit(1);
}
#define CHECK(condition) \
  if (!(condition)) fail(#condition, __LINE__)

std::vector<Isa> isas() {
  std::vector<Isa> out;
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (isa_available(static_cast<Isa>(isa))) out.push_back(static_cast<Isa>(isa));
  }
  return out;
}

struct Case {
  unsigned unit_bytes;
  std::size_t units;
  ClassMap map;
  Bytes base, fresh;
  std::vector<std::uint32_t> offsets;
  Bytes old_bits, zigzag;  // in order of places
};

std::uint64_t unit_at(const Bytes& bytes, unsigned width, std::size_t index) {
  std::uint64_t unit = 0;
  std::memcpy(&unit, bytes.data() + index * width, width);
  return unit;
}

void append(Bytes& bytes, unsigned width, std::uint64_t unit) {
  const auto* from = reinterpret_cast<const unsigned char*>(&unit);
  bytes.insert(bytes.end(), from, from + width);
}

std::uint64_t width_mask(unsigned width) {
  return ~std::uint64_t{0} >> (64 - 8 * width);
}

Case random_case() {
  static const unsigned kFields[][3] = {{2, 7, 255}, {2, 10, 31}, {4, 23, 255}, {8, 52, 2047},
                                        {1, 3, 15},  {1, 2, 31},  {4, 0, 0}};
  const auto& field = kFields[below(7)];
  Case out{};
  out.unit_bytes = field[0];
  out.units = below(4) == 0 ? below(4) : below(1500);
  out.map = {field[1], field[2], static_cast<std::uint32_t>(field[2] == 0 ? 0 : below(field[2] + 1)),
             static_cast<std::uint32_t>(1 + below(kMaxClasses))};
  const bool few_exponents = below(2) == 0;
  const std::uint64_t density = below(101);
  for (std::size_t i = 0; i < out.units; ++i) {
    std::uint64_t unit = random_bits();
    if (few_exponents && field[2] != 0) {
      unit &= ~(std::uint64_t{field[2]} << field[1]);
      unit |= ((out.map.lowest + below(4)) & field[2]) << field[1];
    }
    const std::uint64_t mask = width_mask(out.unit_bytes);
    unit &= mask;
    append(out.base, out.unit_bytes, unit);
    std::uint64_t step = 0;
    if (below(100) < density) step = below(8) == 0 ? random_bits() : below(2) == 0 ? 1 : ~std::uint64_t{0};
    step &= mask;
    append(out.fresh, out.unit_bytes, (unit + step) & mask);
    if (step == 0) continue;
    const bool is_negative = (step >> (8 * out.unit_bytes - 1)) != 0;
    out.offsets.push_back(static_cast<std::uint32_t>(i));
    append(out.old_bits, out.unit_bytes, unit);
    append(out.zigzag, out.unit_bytes, ((step << 1) ^ (is_negative ? mask : 0)) & mask);
  }
  return out;
}

struct RankedCase {
  std::vector<std::uint64_t> members, changes;
  std::vector<std::uint32_t> ranks, order;
  bool operator==(const RankedCase&) const = default;
};

RankedCase rank_plainly(const Case& in) {
  RankedCase out{std::vector<std::uint64_t>(in.map.count), std::vector<std::uint64_t>(in.map.count), {}, {}};
  std::vector<std::vector<std::uint32_t>> ranks(in.map.count), order(in.map.count);
  std::size_t change = 0;
  for (std::size_t i = 0; i < in.units; ++i) {
    const auto exponent = static_cast<std::int64_t>((unit_at(in.base, in.unit_bytes, i) >> in.map.shift) & in.map.mask);
    const auto c =
        static_cast<std::size_t>(std::clamp<std::int64_t>(exponent - in.map.lowest, 0, std::int64_t{in.map.count} - 1));
    if (change < in.offsets.size() && in.offsets[change] == i) {
      ranks[c].push_back(static_cast<std::uint32_t>(out.members[c]));
      order[c].push_back(static_cast<std::uint32_t>(change++));
      ++out.changes[c];
    }
    ++out.members[c];
  }
  for (std::size_t c = 0; c < in.map.count; ++c) {
    out.ranks.insert(out.ranks.end(), ranks[c].begin(), ranks[c].end());
    out.order.insert(out.order.end(), order[c].begin(), order[c].end());
  }
  return out;
}

RankedCase rank_with(Isa isa, const Case& in) {
  CHECK(select_isa(isa));
  RankedCase out{std::vector<std::uint64_t>(in.map.count), std::vector<std::uint64_t>(in.map.count),
                 std::vector<std::uint32_t>(in.offsets.size()), std::vector<std::uint32_t>(in.offsets.size())};
  const RankTask task{in.fresh.data(), in.units,           in.offsets.data(),  in.old_bits.data(), in.offsets.size(),
                      in.map,          out.members.data(), out.changes.data(), out.ranks.data(),   out.order.data()};
  CHECK(rank_changes(task, in.unit_bytes).status == TightStatus::ok);
  return out;
}

struct Lists {
  std::vector<ClassEntry> entries;
  std::vector<std::uint32_t> marks;
  Bytes zigzag;
};

// Marks changed or unchanged members, large or small steps, and takes low bits as chance will have it.
Lists random_lists(const Case& in, const RankedCase& ranked) {
  Lists out;
  std::size_t start = 0;
  for (std::size_t c = 0; c < in.map.count; ++c) {
    ClassEntry entry{};
    const auto changes = static_cast<std::size_t>(ranked.changes[c]);
    if (changes != 0) {
      entry.changes = static_cast<std::uint32_t>(changes);
      entry.unchanged_marked = static_cast<std::uint32_t>(below(2));
      entry.gap_bits = static_cast<std::uint32_t>(below(25));
      std::size_t next = start;
      for (std::uint32_t rank = 0; rank < ranked.members[c]; ++rank) {
        const bool is_changed = next < start + changes && ranked.ranks[next] == rank;
        next += is_changed;
        if (is_changed == (entry.unchanged_marked == 0)) out.marks.push_back(rank), ++entry.marks;
      }
      for (std::size_t i = start; i < start + changes; ++i) {
        const auto zigzag = unit_at(in.zigzag, in.unit_bytes, ranked.order[i]);
        append(out.zigzag, in.unit_bytes, zigzag);
        entry.large += zigzag > 2;
      }
      if (entry.large != 0) {
        entry.small_marked = static_cast<std::uint32_t>(below(2));
        entry.large_marks = entry.small_marked != 0 ? entry.changes - entry.large : entry.large;
        entry.run_bits = static_cast<std::uint32_t>(below(25));
        entry.excess_bits = static_cast<std::uint32_t>(below(8 * in.unit_bytes - 1));
      }
    }
    out.entries.push_back(entry);
    start += changes;
  }
  return out;
}

struct Coded {
  Bytes unary, fields;
};

Coded write(const Case& in, const Lists& lists) {
  std::size_t unary_bits = 0, field_bits = 0;
  for (const auto& entry : lists.entries) {
    unary_bits += entry.marks + in.units + entry.large_marks + entry.changes + entry.large * 65u;
    field_bits += entry.marks * entry.gap_bits + entry.large_marks * entry.run_bits + entry.large * 64u + entry.changes;
  }
  Coded out{Bytes(unary_bits / 8 + 1), Bytes(field_bits / 8 + 1)};
  std::size_t unary_size, fields_size;
  write_lists(lists.entries.data(), in.map.count, lists.marks.data(), lists.zigzag.data(), in.unit_bytes,
              out.unary.data(), out.fields.data(), &unary_size, &fields_size);
  CHECK(unary_size <= out.unary.size() && fields_size <= out.fields.size());
  return {Bytes(out.unary.begin(), out.unary.begin() + static_cast<std::ptrdiff_t>(unary_size)),
          Bytes(out.fields.begin(), out.fields.begin() + static_cast<std::ptrdiff_t>(fields_size))};
}

struct Decoded {
  TightStatus read, found;
  std::vector<std::uint32_t> marks, offsets, order;
  Bytes zigzag, old_bits;
  bool operator==(const Decoded&) const = default;
};

Decoded decode(Isa isa, const Case& in, const std::vector<ClassEntry>& entries, const Coded& coded) {
  CHECK(select_isa(isa));
  std::size_t changes = 0, marks = 0;
  for (const auto& entry : entries) changes += entry.changes, marks += entry.marks;
  Decoded out{TightStatus::ok,
              TightStatus::ok,
              std::vector<std::uint32_t>(marks),
              std::vector<std::uint32_t>(changes),
              std::vector<std::uint32_t>(changes),
              Bytes(changes * in.unit_bytes),
              Bytes(changes * in.unit_bytes)};
  out.read = read_lists(entries.data(), in.map.count, coded.unary.data(), coded.unary.size(), coded.fields.data(),
                        coded.fields.size(), in.units, in.unit_bytes, out.marks.data(), out.zigzag.data())
                 .status;
  if (out.read != TightStatus::ok) return out;
  for (std::size_t i = 0; i < changes; ++i) CHECK(unit_at(out.zigzag, in.unit_bytes, i) != 0);
  const FindTask task{in.base.data(),   in.units,           in.map,           entries.data(),
                      out.marks.data(), out.offsets.data(), out.order.data(), out.old_bits.data()};
  out.found = find_changes(task, in.unit_bytes).status;
  for (std::size_t i = 0; out.found == TightStatus::ok && i < changes; ++i) {
    CHECK(out.offsets[i] < in.units && (i == 0 || out.offsets[i - 1] < out.offsets[i]) && out.order[i] < changes);
  }
  return out;
}

void damage(Bytes& bytes) {
  if (bytes.empty() || below(8) == 0) return bytes.push_back(static_cast<unsigned char>(below(256)));
  if (below(8) == 0) return bytes.resize(below(bytes.size()));
  bytes[below(bytes.size())] ^= static_cast<unsigned char>(1u << below(8));
}

void damage(const Case& in, std::vector<ClassEntry>& entries) {
  auto& entry = entries[below(entries.size())];
  if (entry.changes == 0) return;
  switch (below(5)) {
    case 0:
      entry.gap_bits = static_cast<std::uint32_t>(below(25));
      break;
    case 1:
      entry.unchanged_marked ^= 1;
      break;
    case 2:
      entry.marks = static_cast<std::uint32_t>(below(in.units + 1));
      break;
    case 3:
      entry.excess_bits = static_cast<std::uint32_t>(below(8 * in.unit_bytes - 1));
      break;
    default:
      entry.large = static_cast<std::uint32_t>(below(entry.changes + 1));
      entry.large_marks = entry.small_marked != 0 ? entry.changes - entry.large : entry.large;
      if (entry.large == 0) entry.large_marks = entry.small_marked = 0;
  }
}

void run_round() {
  const Case in = random_case();
  const RankedCase ranked = rank_plainly(in);
  const Lists lists = random_lists(in, ranked);
  const Coded coded = write(in, lists);
  Coded broken = coded;
  auto broken_entries = lists.entries;
  if (below(2) == 0) damage(broken.unary);
  if (below(2) == 0) damage(broken.fields);
  if (below(2) == 0) damage(in, broken_entries);
  const Decoded expected_broken = decode(Isa::scalar, in, broken_entries, broken);
  for (const Isa isa : isas()) {
    CHECK(rank_with(isa, in) == ranked);
    const Decoded decoded = decode(isa, in, lists.entries, coded);
    CHECK(decoded.read == TightStatus::ok && decoded.found == TightStatus::ok);
    CHECK(decoded.marks == lists.marks && decoded.zigzag == lists.zigzag);
    CHECK(decoded.offsets == in.offsets && decoded.old_bits == in.old_bits);
    for (std::size_t i = 0; i < decoded.order.size(); ++i) CHECK(ranked.order[decoded.order[i]] == i);
    CHECK(decode(isa, in, broken_entries, broken) == expected_broken);
  }
}

void check_offsets_that_lie() {
  const Bytes units(2 * 200), old_bits(2 * 3);
  const std::vector<std::vector<std::uint32_t>> bad = {{5, 5, 6}, {5, 4, 6}, {70, 5, 80}, {1, 2, 200}, {1, 199, 198}};
  for (const auto& offsets : bad) {
    for (const Isa isa : isas()) {
      CHECK(select_isa(isa));
      std::vector<std::uint64_t> members(16), changes(16);
      std::vector<std::uint32_t> ranks(3), order(3);
      const RankTask task{
          units.data(),   200,          offsets.data(), old_bits.data(), 3, {7, 255, 0, 16}, members.data(),
          changes.data(), ranks.data(), order.data()};
      CHECK(rank_changes(task, 2).status == TightStatus::not_ascending);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const long rounds = count > 1 ? std::atol(arguments[1]) : 2000;
  random_bits.seed(count > 2 ? static_cast<std::uint64_t>(std::atoll(arguments[2])) : 0);
  check_offsets_that_lie();
  for (long round = 0; round < rounds; ++round) run_round();
  std::printf("%ld rounds on", rounds);
  for (const Isa isa : isas()) std::printf(" %s", isa_name(isa));
  std::printf(": all equal\n");
  return 0;
}
