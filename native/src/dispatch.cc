// Which kernels are in use, and the kernels' fronts that do what no instruction set changes.
#include <algorithm>
#include <array>
#include <atomic>

#include "table.h"

namespace syncline {
namespace {

constexpr std::array kFastestFirst = {Isa::neon, Isa::avx512, Isa::avx2, Isa::scalar};
constexpr int kNone = -1;
constinit std::atomic<int> chosen{kNone};

const Table* table_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::scalar:
      return &scalar_table;
#if defined(__x86_64__)
    case Isa::avx2:
      return &avx2_table;
    case Isa::avx512:
      return &avx512_table;
#elif defined(__aarch64__)
    case Isa::neon:
      return &neon_table;
#endif
    default:
      return nullptr;
  }
}

bool runs(Isa isa) noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == Isa::avx2 || isa == Isa::avx512) {
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                          __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (!has_avx2 || isa == Isa::avx2) return has_avx2;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512ifma") &&
           __builtin_cpu_supports("avx512vpopcntdq");
  }
#endif
  return table_of(isa) != nullptr;
}

}  // namespace

const char* isa_name(Isa isa) noexcept {
  constexpr const char* kNames[kIsaCount] = {"scalar", "avx2", "avx512", "neon"};
  return kNames[static_cast<int>(isa)];
}

bool isa_available(Isa isa) noexcept {
  return table_of(isa) != nullptr && runs(isa);
}

bool select_isa(Isa isa) noexcept {
  if (!isa_available(isa)) return false;
  chosen.store(static_cast<int>(isa));
  return true;
}

Isa selected_isa() noexcept {
  int isa = chosen.load();
  if (isa == kNone) {
    isa = static_cast<int>(*std::find_if(kFastestFirst.begin(), kFastestFirst.end(), isa_available));
    // Another thread may have chosen meanwhile; then its choice stands.
    int none = kNone;
    if (!chosen.compare_exchange_strong(none, isa)) isa = none;
  }
  return static_cast<Isa>(isa);
}

const Table& table() noexcept {
  return *table_of(selected_isa());
}

Progress diff(const DiffTask& task, unsigned unit_bytes) noexcept {
  return table().diff(task, unit_bytes);
}

Lanes fingerprint(const unsigned char* bits, std::size_t count, unsigned unit_bytes, std::uint64_t start,
                  Lanes seeds) noexcept {
  const unsigned digit_bytes = std::min(unit_bytes, 4u);
  std::size_t left = count * (unit_bytes / digit_bytes);
  std::uint64_t digit = start * (unit_bytes / digit_bytes);
  Lanes total{0, 0};
  const auto add = [&](std::size_t digits, Lanes lanes) {
    total = {total.a + lanes.a, total.b + lanes.b};
    bits += digits * digit_bytes;
    digit += digits;
    left -= digits;
  };
  const auto add_part = [&](std::size_t digits) {
    const std::size_t column = digit % kRowDigits;
    add(digits, fingerprint_part(bits, digits, digit_bytes, column, digit / kRowDigits, seeds));
  };
  if (digit % kRowDigits != 0) add_part(std::min(left, kRowDigits - digit % kRowDigits));
  const std::size_t rows = left / kRowDigits;
  add(rows * kRowDigits, table().fingerprint_rows(bits, rows, digit_bytes, digit / kRowDigits, seeds));
  add_part(left);
  return total;
}

std::uint64_t read_words(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept {
  return table().read_words(first, second, size);
}

void split_planes(const unsigned char* units, std::size_t count, unsigned unit_bytes, bool rotated,
                  unsigned char* planes) noexcept {
  table().split_planes(units, count, unit_bytes, rotated, planes);
}

void join_planes(const unsigned char* const* planes, std::size_t count, unsigned unit_bytes, bool rotated,
                 unsigned char* units) noexcept {
  table().join_planes(planes, count, unit_bytes, rotated, units);
}

}  // namespace syncline
