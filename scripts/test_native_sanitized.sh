#!/usr/bin/env bash
# Build the kernels with the address and undefined-behaviour sanitizers and run their tests and fuzz targets.
# Usage: scripts/test_native_sanitized.sh [directory with cmake, ctest and ninja; .venv/bin unless given]
set -euo pipefail
bin=$(cd "${1:-$(dirname "$0")/../.venv/bin}" && pwd)
cd "$(dirname "$0")/.."
build=build/sanitized
mkdir -p build
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
"$bin/cmake" -S . -B "$build" -G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" -DSYNCLINE_NATIVE_TESTS=ON \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS=$flags" >"$build.log" 2>&1 ||
  { cat "$build.log"; exit 1; }
"$bin/cmake" --build "$build" >>"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
"$bin/ctest" --test-dir "$build" --output-on-failure
