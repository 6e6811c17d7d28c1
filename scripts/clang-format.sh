#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -co --exclude-standard 'native/*.cpp' 'native/*.hpp' 'native/*.h' | xargs -r clang-format "$@"
