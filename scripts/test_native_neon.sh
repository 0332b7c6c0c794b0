#!/usr/bin/env bash
# Build the kernels for 64-bit Arm and run their tests and fuzz targets in an emulator.
# Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user).
# Usage: scripts/test_native_neon.sh [directory with cmake, ctest and ninja; .venv/bin unless given]
set -euo pipefail
bin=$(cd "${1:-$(dirname "$0")/../.venv/bin}" && pwd)
cd "$(dirname "$0")/.."
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed; see the top of $0" >&2; exit 1; }
done
"$bin/cmake" -S . -B build/neon -G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" -DSYNCLINE_NATIVE_TESTS=ON \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_EXE_LINKER_FLAGS=-static -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64 >/dev/null
"$bin/cmake" --build build/neon -- --quiet
"$bin/ctest" --test-dir build/neon --output-on-failure
