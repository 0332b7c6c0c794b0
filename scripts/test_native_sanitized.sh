#!/usr/bin/env bash
# Build the kernels with the address and undefined-behaviour sanitizers and run their tests and fuzz targets; then with the
# thread sanitizer, and call them from several threads at once.
# Usage: scripts/test_native_sanitized.sh [directory with cmake, ctest and ninja; .venv/bin unless given]
set -euo pipefail
bin=$(cd "${1:-$(dirname "$0")/../.venv/bin}" && pwd)
cd "$(dirname "$0")/.."
mkdir -p build

build() {  # directory, sanitizers, targets
  local log=$1.log
  "$bin/cmake" -S . -B "$1" -G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" -DSYNCLINE_NATIVE_TESTS=ON \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    "-DCMAKE_CXX_FLAGS=-fsanitize=$2 -fno-sanitize-recover=all -fno-omit-frame-pointer -g" >"$log" 2>&1 ||
    { cat "$log"; exit 1; }
  "$bin/cmake" --build "$1" --target "${@:3}" >>"$log" 2>&1 || { cat "$log"; exit 1; }
}

build build/sanitized address,undefined all
"$bin/ctest" --test-dir build/sanitized --output-on-failure
build build/sanitized-threads thread test_threads
# Where it may be turned off, without address randomisation, of which some systems do more than the sanitizer can stand.
still=()
if setarch --addr-no-randomize true 2>/dev/null; then still=(setarch --addr-no-randomize); fi
"${still[@]}" build/sanitized-threads/test_threads
