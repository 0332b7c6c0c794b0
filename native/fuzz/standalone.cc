// Drives a fuzz target without libFuzzer: a bounded number of random inputs from a fixed seed.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  const long runs = argc > 1 ? std::atol(argv[1]) : 100000;
  std::mt19937_64 random_bits(1);
  for (long run = 0; run < runs; ++run) {
    std::vector<std::uint8_t> data(random_bits() % 600);
    // Small bytes and escapes are what gap bytes look like; pure noise is refused at once.
    for (auto& byte : data) {
      const std::uint64_t r = random_bits();
      byte = r % 4 == 0 ? static_cast<std::uint8_t>(255) : static_cast<std::uint8_t>(r >> 8 & (r % 4 == 1 ? 255 : 7));
    }
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  std::printf("%ld inputs\n", runs);
  return 0;
}
