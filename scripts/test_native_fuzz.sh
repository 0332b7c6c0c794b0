#!/usr/bin/env bash
# Run every fuzz target under libFuzzer, with the address and undefined-behaviour sanitizers, from golden seeds.
# Needs clang++ with its run-time library (Debian: clang, libclang-rt-dev). Without it this says so and ends well: the same
# targets run on random inputs in test_native_sanitized.sh.
# Usage: scripts/test_native_fuzz.sh [seconds for each target; 5 unless given] [directory with cmake and ninja]
set -euo pipefail
seconds=${1:-5}
bin=$(cd "${2:-$(dirname "$0")/../.venv/bin}" && pwd)
cd "$(dirname "$0")/.."
build=build/fuzz
seeds=$build/seeds
mkdir -p "$build"
probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
if ! clang++ -fsanitize=fuzzer -x c++ - -o "$build/probe" <<<"$probe" 2>"$build/probe.log"; then
  echo "NOT RUN: libFuzzer; clang++ with its run-time library is not installed (Debian: clang, libclang-rt-dev)"
  exit 0
fi
flags="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
"$bin/cmake" -S . -B "$build" -G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" -DCMAKE_CXX_COMPILER=clang++ \
  -DSYNCLINE_NATIVE_TESTS=ON -DSYNCLINE_LIBFUZZER=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  "-DCMAKE_CXX_FLAGS=$flags" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
"$bin/cmake" --build "$build" --target fuzz_{changes,dense,gaps,literals,positions,symbols,tight} >>"$build.log" 2>&1 ||
  { cat "$build.log"; exit 1; }
"$bin/python" scripts/make_fuzz_seeds.py "$seeds"
for target in changes dense gaps literals positions symbols tight; do
  corpus=$build/corpus/$target
  mkdir -p "$corpus" "$seeds/$target"
  # Each run is bounded, and what it finds is kept for the next.
  "$build/fuzz_$target" "-max_total_time=$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
    "-artifact_prefix=$build/" "$corpus" "$seeds/$target" >"$build/$target.log" 2>&1 ||
    { tail -40 "$build/$target.log"; exit 1; }
  echo "libFuzzer fuzz_$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$target.log") inputs, nothing found"
done
