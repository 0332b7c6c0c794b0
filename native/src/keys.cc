// Column keys, computed by the compiler.
#include "table.h"

namespace syncline {
namespace {

constexpr Keys make_keys() {
  Keys made{};
  for (unsigned lane = 0; lane < 2; ++lane) {
    for (std::size_t column = 0; column < kRowDigits; ++column) {
      const auto key = static_cast<std::uint32_t>(splitmix(column) >> (32 * lane)) | 1;
      made.column[lane][column] = key;
      for (unsigned log = 0; log < 3; ++log) {
        const std::size_t per_word = std::size_t{8} >> log;
        const std::size_t words = kRowDigits / per_word;
        made.word[log][lane][column % per_word * words + column / per_word] = key;
      }
    }
  }
  return made;
}

}  // namespace

constinit const Keys keys = make_keys();

}  // namespace syncline
