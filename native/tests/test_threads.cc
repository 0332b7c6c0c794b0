// Every kernel from several threads at once on the same inputs, from the first call on, in which the instruction set is
// chosen, and while one thread keeps choosing others. Built with the thread sanitizer; results must not depend on it.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "kernels.h"
#include "tight.h"

using namespace syncline;

namespace {

constexpr std::size_t kCount = 5000;
constexpr unsigned kWidth = 2;
constexpr int kThreads = 6;
constexpr int kRounds = 30;

using Bytes = std::vector<unsigned char>;

struct Inputs {
  Bytes old_bits, new_bits;
};

// Everything that the kernels make of the inputs, as one list of numbers.
std::vector<std::uint64_t> run_all(const Inputs& in) {
  Bytes old_bits = in.old_bits;
  std::vector<std::uint32_t> offsets(kCount);
  Bytes changed_old(kCount * kWidth);
  Bytes changed_new(kCount * kWidth);
  const Progress progress = diff({old_bits.data(), in.new_bits.data(), 0, kCount, true, offsets.data(),
                                  changed_old.data(), changed_new.data(), kCount},
                                 kWidth);
  offsets.resize(progress.found);
  const Lanes whole = fingerprint(in.new_bits.data(), kCount, kWidth, 7, {1, 2});
  const Lanes change = fingerprint_change(offsets.data(), changed_old.data(), changed_new.data(), progress.found,
                                          kWidth, 7, {1, 2});
  scatter(old_bits.data(), kCount, offsets.data(), changed_new.data(), progress.found, kWidth);
  gather(in.new_bits.data(), kCount, offsets.data(), changed_new.data(), progress.found, kWidth);
  Bytes high(progress.found + kCount);
  std::size_t high_size = 0;
  encode_gaps(offsets.data(), progress.found, 0, nullptr, high.data(), &high_size);
  decode_gaps(nullptr, 0, high.data(), high_size, kCount, offsets.data(), progress.found);
  Bytes planes(kCount * kWidth);
  split_planes(in.new_bits.data(), kCount, kWidth, true, planes.data());
  const unsigned char* from[] = {planes.data(), planes.data() + kCount};
  join_planes(from, kCount, kWidth, true, old_bits.data());
  std::vector<std::uint64_t> members(16);
  std::vector<std::uint64_t> changes(16);
  std::vector<std::uint32_t> ranks(progress.found);
  std::vector<std::uint32_t> order(progress.found);
  const RankTask task{in.new_bits.data(), kCount,         offsets.data(), changed_old.data(), progress.found,
                      {7, 255, 0, 12},    members.data(), changes.data(), ranks.data(),       order.data()};
  rank_changes(task, kWidth);
  std::vector<std::uint64_t> found{progress.found, whole.a, whole.b, change.a, change.b, high_size};
  found.insert(found.end(), offsets.begin(), offsets.end());
  found.insert(found.end(), ranks.begin(), ranks.end());
  found.insert(found.end(), members.begin(), members.end());
  found.insert(found.end(), old_bits.begin(), old_bits.end());
  return found;
}

}  // namespace

int main() {
  std::mt19937_64 random_bits(3);
  Inputs in{Bytes(kCount * kWidth), {}};
  for (auto& byte : in.old_bits) byte = static_cast<unsigned char>(random_bits());
  in.new_bits = in.old_bits;
  for (std::size_t i = 0; i < in.new_bits.size(); i += 1 + random_bits() % 90) in.new_bits[i] ^= 1;
  std::vector<std::vector<std::uint64_t>> results(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        if (t == 0 && round > 0) select_isa(static_cast<Isa>(round % kIsaCount));
        results[t] = run_all(in);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) {
    if (result != results[0]) {
      std::fprintf(stderr, "FAILED: threads disagree\n");
      return EXIT_FAILURE;
    }
  }
  std::printf("%d threads, %d rounds, %zu numbers each, all the same\n", kThreads, kRounds, results[0].size());
  return EXIT_SUCCESS;
}
