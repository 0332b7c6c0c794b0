// Every kernel on every instruction set, on buffers that end where their allocation ends, so that the address
// sanitizer sees any over-read; results are compared with the plainest code that can be written.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels.h"

using namespace syncline;

namespace {

int failures = 0;
int checks = 0;

void expect(bool holds, const char* what, Isa isa, unsigned width, std::size_t count) {
  ++checks;
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED %s: isa %s, width %u, count %zu\n", what, isa_name(isa), width, count);
}

std::mt19937_64 random_bits(20260701);

// Exactly `size` bytes on the heap, `shift` bytes past an aligned start.
struct Bytes {
  Bytes(std::size_t size, std::size_t shift) : memory(new unsigned char[size + shift]), size(size), shift(shift) {
    for (std::size_t i = 0; i < size; ++i) data()[i] = static_cast<unsigned char>(random_bits());
  }
  unsigned char* data() const { return memory.get() + shift; }
  std::unique_ptr<unsigned char[]> memory;
  std::size_t size;
  std::size_t shift;
};

std::uint64_t unit(const unsigned char* at, unsigned width) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, width);
  return value;
}

// `room` for that many changes at a time; the comparison is taken up again where it ran out.
void check_diff(Isa isa, unsigned width, std::size_t count, unsigned percent, bool refresh, std::size_t room) {
  Bytes old_bits(count * width, random_bits() % 8);
  Bytes new_bits(count * width, random_bits() % 8);
  std::vector<std::uint32_t> wanted;
  for (std::size_t i = 0; i < count; ++i) {
    if (random_bits() % 100 >= percent) std::memcpy(new_bits.data() + i * width, old_bits.data() + i * width, width);
    if (unit(old_bits.data() + i * width, width) != unit(new_bits.data() + i * width, width)) {
      wanted.push_back(static_cast<std::uint32_t>(i));
    }
  }
  const std::vector<unsigned char> before(old_bits.data(), old_bits.data() + old_bits.size);
  std::size_t seen = 0;
  bool same = true;
  for (std::size_t begin = 0; same && (begin < count || count == 0);) {
    std::unique_ptr<std::uint32_t[]> offsets(new std::uint32_t[room]);
    Bytes olds(room * width, 1);
    Bytes news(room * width, 3);
    const Progress progress =
        diff({old_bits.data(), new_bits.data(), begin, count, refresh, offsets.get(), olds.data(), news.data(), room},
             width);
    same = progress.found <= room && seen + progress.found <= wanted.size() &&
           (progress.stop == count || (progress.stop > begin && progress.stop < count && progress.found > 0));
    for (std::size_t i = 0; same && i < progress.found; ++i, ++seen) {
      const std::size_t place = wanted[seen] * std::size_t{width};
      same = offsets[i] == wanted[seen] && std::memcmp(olds.data() + i * width, &before[place], width) == 0 &&
             std::memcmp(news.data() + i * width, new_bits.data() + place, width) == 0;
    }
    if (progress.stop == count) break;
    begin = progress.stop;
  }
  expect(same && seen == wanted.size(), "diff: changes", isa, width, count);
  const void* left = refresh ? new_bits.data() : before.data();
  expect(count == 0 || std::memcmp(old_bits.data(), left, old_bits.size) == 0, "diff: refresh", isa, width, count);
}

void check_fingerprint(Isa isa, unsigned width, std::size_t count, std::uint64_t start) {
  Bytes bits(count * width, random_bits() % 8);
  const Lanes seeds{random_bits(), random_bits()};
  select_isa(Isa::scalar);
  Lanes wanted{0, 0};
  for (std::size_t i = 0; i < count; ++i) {
    const Lanes one = fingerprint(bits.data() + i * width, 1, width, start + i, seeds);
    wanted.a += one.a;
    wanted.b += one.b;
  }
  select_isa(isa);
  const Lanes found = fingerprint(bits.data(), count, width, start, seeds);
  expect(found.a == wanted.a && found.b == wanted.b, "fingerprint", isa, width, count);
}

void check_lists(Isa isa, unsigned width, std::size_t count) {
  Bytes target(count * width, 0);
  const std::vector<unsigned char> before(target.data(), target.data() + target.size);
  std::vector<std::uint32_t> offsets;
  for (std::size_t i = 0; i < count; ++i) {
    if (random_bits() % 7 == 0) offsets.push_back(static_cast<std::uint32_t>(i));
  }
  Bytes bits(offsets.size() * width, 0);
  Bytes back(offsets.size() * width, 0);
  Outcome outcome = scatter(target.data(), count, offsets.data(), bits.data(), offsets.size(), width);
  expect(outcome.status == Status::ok, "scatter", isa, width, count);
  outcome = gather(target.data(), count, offsets.data(), back.data(), offsets.size(), width);
  expect(outcome.status == Status::ok && (bits.size == 0 || std::memcmp(bits.data(), back.data(), bits.size) == 0),
         "gather", isa, width, count);
  outcome = compare(target.data(), count, offsets.data(), bits.data(), offsets.size(), width);
  expect(outcome.status == Status::ok, "compare", isa, width, count);
  for (std::size_t wrong = 0; wrong < offsets.size(); wrong += 1 + offsets.size() / 3) {
    back.data()[wrong * width] ^= 1;
    outcome = compare(target.data(), count, offsets.data(), back.data(), offsets.size(), width);
    expect(outcome.status == Status::differs && outcome.position == wrong, "compare: differs", isa, width, count);
    back.data()[wrong * width] ^= 1;
  }
  outcome = check_ascending(offsets.data(), offsets.size(), count);
  expect(outcome.status == Status::ok, "check_ascending", isa, width, count);
  offsets.push_back(static_cast<std::uint32_t>(count));
  outcome = check_ascending(offsets.data(), offsets.size(), count);
  expect(outcome.status == Status::out_of_range && outcome.position == offsets.size() - 1,
         "check_ascending: out of range", isa, width, count);
  outcome = compare(target.data(), count, offsets.data(), bits.data(), offsets.size(), width);
  expect(outcome.status == Status::out_of_range, "compare: out of range", isa, width, count);
  Bytes more(offsets.size() * width, 0);
  const std::vector<unsigned char> now(target.data(), target.data() + target.size);
  outcome = scatter(target.data(), count, offsets.data(), more.data(), offsets.size(), width);
  expect(outcome.status == Status::out_of_range && outcome.position == offsets.size() - 1 &&
             (target.size == 0 || std::memcmp(now.data(), target.data(), target.size) == 0),
         "scatter: out of range", isa, width, count);
}

void check_gaps(Isa isa, unsigned low_bytes, std::size_t count) {
  std::vector<std::uint32_t> offsets;
  std::uint32_t at = 0;
  for (std::size_t i = 0; i < count; ++i) {
    at += static_cast<std::uint32_t>(random_bits() % (i % 5 == 0 ? 100000 : 300));
    offsets.push_back(at++);
  }
  const std::size_t most = count + (count != 0 ? (offsets.back() >> 8 * low_bytes) / 255 : 0);
  std::unique_ptr<unsigned char[]> low(new unsigned char[low_bytes * count]);
  std::unique_ptr<unsigned char[]> high(new unsigned char[most]);
  std::size_t used = 0;
  Outcome outcome = encode_gaps(offsets.data(), count, low_bytes, low.get(), high.get(), &used);
  expect(outcome.status == Status::ok && used <= most, "encode_gaps", isa, low_bytes, count);
  std::vector<std::uint32_t> back(count);
  outcome = decode_gaps(low.get(), low_bytes, high.get(), used, std::uint64_t{1} << 32, back.data(), count);
  expect(outcome.status == Status::ok && back == offsets, "decode_gaps", isa, low_bytes, count);
  if (count == 0) return;
  outcome = decode_gaps(low.get(), low_bytes, high.get(), used, offsets.back(), back.data(), count);
  expect(outcome.status == Status::out_of_range, "decode_gaps: limit", isa, low_bytes, count);
  outcome = decode_gaps(low.get(), low_bytes, high.get(), used - 1, std::uint64_t{1} << 32, back.data(), count);
  expect(outcome.status == Status::cut_short, "decode_gaps: cut short", isa, low_bytes, count);
  outcome = decode_gaps(low.get(), low_bytes, high.get(), used, std::uint64_t{1} << 32, back.data(), count - 1);
  expect(outcome.status == Status::wrong_count, "decode_gaps: count", isa, low_bytes, count);
}

// Offsets that fall: refused before they need more room than the last of them tells.
void check_falling_gaps(Isa isa) {
  for (const std::vector<std::uint32_t>& offsets : {std::vector<std::uint32_t>{1000000, 5}, {5, 5}, {0, 9, 3}}) {
    Bytes high(offsets.size() + offsets.back() / 255, 0);
    std::size_t used = 0;
    const Outcome outcome = encode_gaps(offsets.data(), offsets.size(), 0, nullptr, high.data(), &used);
    expect(outcome.status == Status::not_ascending && outcome.position < offsets.size(), "encode_gaps: falling", isa, 0,
           offsets.size());
  }
}

}  // namespace

int main() {
  constexpr std::size_t kCounts[] = {0, 1, 31, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025, 2049, 5000};
  int isas = 0;
  for (int index = 0; index < kIsaCount; ++index) {
    const Isa isa = static_cast<Isa>(index);
    if (!select_isa(isa)) continue;
    ++isas;
    for (const std::size_t count : kCounts) {
      for (const unsigned width : {1u, 2u, 4u, 8u}) {
        for (const unsigned percent : {0u, 1u, 10u, 60u, 100u}) {
          for (const std::size_t room : {count, count / 3 + 1, std::size_t{200}}) {
            check_diff(isa, width, count, percent, false, room);
            check_diff(isa, width, count, percent, true, room);
          }
        }
        for (const std::uint64_t start : {0ull, 1ull, 1023ull, 1024ull, (1ull << 40) + 5}) {
          check_fingerprint(isa, width, count, start);
        }
        check_lists(isa, width, count);
      }
      for (const unsigned low_bytes : {0u, 1u, 2u}) check_gaps(isa, low_bytes, count);
    }
    check_falling_gaps(isa);
    const Bytes first(8 * 1001, 3);
    const Bytes second(8 * 1001, 5);
    Bytes mixed(first.size, 1);
    xor_bytes(first.data(), second.data(), mixed.data(), first.size - 3);
    bool same = true;
    for (std::size_t i = 0; i + 3 < first.size; ++i) {
      same = same && mixed.data()[i] == (first.data()[i] ^ second.data()[i]);
    }
    expect(same, "xor_bytes", isa, 1, first.size);
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < first.size; i += 8) sum += unit(first.data() + i, 8) + unit(second.data() + i, 8);
    expect(read_words(first.data(), second.data(), first.size) == sum, "read_words", isa, 8, 1001);
  }
  std::printf("%d checks on %d instruction sets, %d failed\n", checks, isas, failures);
  return failures == 0 && isas != 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
