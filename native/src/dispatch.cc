// One table of kernels, chosen on first use; and what every instruction set shares.
#include <atomic>

#include "table.h"

namespace syncline {
namespace {

const Table* table_for(Isa isa) noexcept {
  switch (isa) {
    case Isa::scalar:
      return &scalar_table;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") ? &avx2_table : nullptr;
    case Isa::avx512:
      return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vpopcntdq")
                 ? &avx512_table
                 : nullptr;
#elif defined(__aarch64__)
    case Isa::neon:
      return &neon_table;
#endif
    default:
      return nullptr;
  }
}

Isa best() noexcept {
  for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::neon}) {
    if (table_for(isa) != nullptr) return isa;
  }
  return Isa::scalar;
}

std::atomic<int> chosen{-1};

const Table& table() noexcept { return *table_for(selected_isa()); }

std::uint64_t digit_at(const unsigned char* bits, std::size_t index, unsigned digit_bytes) noexcept {
  const unsigned char* at = bits + index * digit_bytes;
  if (digit_bytes == 1) return *at;
  if (digit_bytes == 2) return load<std::uint16_t>(at);
  return load<std::uint32_t>(at);
}

// Digits of one row that is not whole.
void add_digits(const unsigned char* bits, std::size_t count, unsigned digit_bytes, std::uint64_t first,
                Lanes seeds, Lanes* total) noexcept {
  Lanes sum{0, 0};
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t digit = digit_at(bits, i, digit_bytes);
    const std::size_t column = (first + i) % kRowDigits;
    sum.a += digit * digit * keys.column[0][column];
    sum.b += digit * digit * keys.column[1][column];
  }
  total->a += sum.a * row_key(seeds.a, first / kRowDigits);
  total->b += sum.b * row_key(seeds.b, first / kRowDigits);
}

}  // namespace

const char* isa_name(Isa isa) noexcept {
  constexpr const char* kNames[kIsaCount] = {"scalar", "avx2", "avx512", "neon"};
  return kNames[static_cast<int>(isa)];
}

bool isa_available(Isa isa) noexcept { return table_for(isa) != nullptr; }

bool select_isa(Isa isa) noexcept {
  if (!isa_available(isa)) return false;
  chosen.store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

Isa selected_isa() noexcept {
  const int isa = chosen.load(std::memory_order_relaxed);
  return isa >= 0 ? static_cast<Isa>(isa) : best();
}

Progress diff(const DiffTask& task, unsigned unit_bytes) noexcept { return table().diff(task, unit_bytes); }

std::uint64_t read_words(const unsigned char* first, const unsigned char* second, std::size_t size) noexcept {
  return table().read_words(first, second, size);
}

Lanes fingerprint(const unsigned char* bits, std::size_t count, unsigned unit_bytes, std::uint64_t start,
                  Lanes seeds) noexcept {
  const unsigned digit_bytes = unit_bytes < 4 ? unit_bytes : 4;
  std::uint64_t first = start * (unit_bytes / digit_bytes);
  std::size_t left = count * (unit_bytes / digit_bytes);
  Lanes total{0, 0};
  const std::size_t into_row = first % kRowDigits;
  if (into_row != 0) {
    const std::size_t head = left < kRowDigits - into_row ? left : kRowDigits - into_row;
    add_digits(bits, head, digit_bytes, first, seeds, &total);
    bits += head * digit_bytes;
    first += head;
    left -= head;
  }
  const std::size_t rows = left / kRowDigits;
  if (rows != 0) {
    const Lanes whole = table().fingerprint_rows(bits, rows, digit_bytes, first / kRowDigits, seeds);
    total.a += whole.a;
    total.b += whole.b;
  }
  const std::size_t done = rows * kRowDigits;
  if (left > done) add_digits(bits + done * digit_bytes, left - done, digit_bytes, first + done, seeds, &total);
  return total;
}

Lanes fingerprint_change(const std::uint32_t* offsets, const unsigned char* old_bits,
                         const unsigned char* new_bits, std::size_t count, unsigned unit_bytes,
                         std::uint64_t start, Lanes seeds) noexcept {
  const unsigned digit_bytes = unit_bytes < 4 ? unit_bytes : 4;
  const unsigned per_unit = unit_bytes / digit_bytes;
  Lanes total{0, 0};
  Lanes in_row{0, 0};
  std::uint64_t row = 0;
  const auto close_row = [&]() noexcept {
    total.a += in_row.a * row_key(seeds.a, row);
    total.b += in_row.b * row_key(seeds.b, row);
    in_row = {0, 0};
  };
  for (std::size_t i = 0; i < count; ++i) {
    for (unsigned part = 0; part < per_unit; ++part) {
      const std::uint64_t place = (start + offsets[i]) * per_unit + part;
      if (place / kRowDigits != row) {
        close_row();
        row = place / kRowDigits;
      }
      const std::uint64_t before = digit_at(old_bits, i * per_unit + part, digit_bytes);
      const std::uint64_t after = digit_at(new_bits, i * per_unit + part, digit_bytes);
      const std::uint64_t rise = after * after - before * before;
      in_row.a += rise * keys.column[0][place % kRowDigits];
      in_row.b += rise * keys.column[1][place % kRowDigits];
    }
  }
  close_row();
  return total;
}

}  // namespace syncline
