#!/usr/bin/env bash
# clang-tidy over native/, with the compile commands of the dev preset.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/dev
cmake --preset dev -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >build/dev/configure.log
clang-tidy --quiet -p build/dev native/src/*.cpp
