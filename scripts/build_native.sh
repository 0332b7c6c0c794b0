#!/usr/bin/env bash
# Build the kernels into src/syncline/kernels/, for work on the code with PYTHONPATH=src.
# Usage: scripts/build_native.sh [python]; that Python needs the packages cmake, nanobind and ninja.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-.venv/bin/python}")
bin=$(cd "$(dirname "$python")" && pwd)
python=$bin/$(basename "$python")
build=build/in-place-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
"$bin/cmake" -S . -B "$build" -G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" "-DPython_EXECUTABLE=$python" \
  "-Dnanobind_ROOT=$("$python" -m nanobind --cmake_dir)" >/dev/null
"$bin/cmake" --build "$build" -- --quiet
"$bin/cmake" --install "$build" --prefix src >/dev/null
