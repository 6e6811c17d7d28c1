#!/usr/bin/env bash
# Runs each libFuzzer target (clang) for FUZZ_SECONDS, default 30. A crash stops it and leaves its input in build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/fuzz
cmake --preset fuzz >build/fuzz/configure.log || { cat build/fuzz/configure.log >&2; exit 1; }
cmake --build build/fuzz >build/fuzz/build.log 2>&1 || { cat build/fuzz/build.log >&2; exit 1; }
for source in native/fuzz/*_fuzz.cpp; do
  name=$(basename "$source" .cpp)
  mkdir -p "build/fuzz/corpus/$name"
  echo "fuzz: $name"
  "$(find build/fuzz -type f -name "$name" -perm -u+x | head -1)" -max_total_time="${FUZZ_SECONDS:-30}" \
    -artifact_prefix="build/fuzz/$name-" -verbosity=0 -print_final_stats=1 "build/fuzz/corpus/$name"
done
