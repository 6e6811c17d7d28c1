#!/usr/bin/env bash
# Installs system packages (apt, when root), creates .venv and builds the extension into it. Safe to repeat:
# each step is skipped while its inputs are unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."

apt_packages=(
  clang clang-format clang-tidy cmake curl crun debian-archive-keyring docker-registry erofs-utils fuse3 g++ git iproute2
  libarchive-dev libclang-rt-14-dev libcurl4-openssl-dev libfuse3-dev libgtest-dev libssl-dev libxxhash-dev libzstd-dev make
  mmdebstrap ninja-build pkg-config procps python3-dev python3-venv runc util-linux xz-utils zstd
)
missing=()
for package in "${apt_packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "setup: these packages are missing and need root: ${missing[*]}" >&2
    exit 77
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

[ -x .venv/bin/python ] || /usr/bin/python3 -m venv .venv
mkdir -p build
stamp=build/setup.stamp
inputs=$(cat pyproject.toml scripts/setup.sh | sha256sum)
if [ "$(cat $stamp 2>/dev/null)" != "$inputs" ]; then
  .venv/bin/python -m pip install -q --upgrade 'pip>=25.1'
  .venv/bin/python -m pip install -q 'scikit-build-core>=1.1' 'pybind11>=3.0'
  .venv/bin/python -m pip install -q --group dev
  # Dependencies first, each in its own build environment (pyfuse3 is a source build); then ourselves without
  # isolation, so that later builds are incremental.
  .venv/bin/python - >build/requirements.txt <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["node"]))
PY
  .venv/bin/python -m pip install -q -r build/requirements.txt
  .venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
  echo "$inputs" >$stamp
else
  # Only the C++ may have changed: an incremental build straight into the editable install.
  scripts/build-native.sh
fi
