#!/usr/bin/env bash
# Incremental build of the Python extension into the editable install.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --build build/py >build/native.log 2>&1 || { cat build/native.log >&2; exit 1; }
cmake --install build/py --component python --prefix \
  "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null
