#!/usr/bin/env bash
# Builds one CMake preset (dev, release, asan, tsan) and runs its C++ tests.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
mkdir -p "build/$preset"
cmake --preset "$preset" >"build/$preset/configure.log" || { cat "build/$preset/configure.log" >&2; exit 1; }
cmake --build "build/$preset" >"build/$preset/build.log" 2>&1 || { cat "build/$preset/build.log" >&2; exit 1; }
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --timeout 300
