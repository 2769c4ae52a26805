#!/usr/bin/env bash
# Builds the native module for arm64 and runs its tests under qemu-user: `make arm64`. Needs from Debian: mmdebstrap,
# g++-aarch64-linux-gnu, qemu-user; from the package index: wheels of the core dependencies for arm64 and Python 3.11.
# TESTS says which tests. To build takes two minutes of processor time, all of tests/unit/native another ten or so.
set -euo pipefail
cd "$(dirname "$0")/.."
home="${ARM64:-.venv.arm64}" python="${PYTHON:-python3}" suite="${SUITE:-bookworm}" # that suite has Python 3.11
mkdir -p "$home"
home="$(realpath "$home")"
export INGOT_ARM64_ROOT="$home/root"

if [ ! -e "$home/.root" ]; then
    rm -rf "$INGOT_ARM64_ROOT"
    mmdebstrap --architectures=arm64 --variant=extract --include=python3.11-minimal,libpython3.11-stdlib \
        --include=libpython3.11-dev,libstdc++6,libgomp1,libffi8,libssl3,zlib1g,libexpat1,libbz2-1.0,liblzma5 \
        --include=libsqlite3-0,libuuid1,ca-certificates "$suite" "$INGOT_ARM64_ROOT"
    touch "$home/.root"
fi
if [ ! -e "$home/.site" ]; then
    "$python" tools/requirements.py core runner > "$home/requirements.txt"
    "$python" -m pip install --quiet --target "$home/site" --only-binary :all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        -r "$home/requirements.txt"
    touch "$home/.site"
fi
cmake -S . -B "$home/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/arm64.cmake" \
    -DPython_EXECUTABLE="$(command -v "$python")" -DPython_INCLUDE_DIR="$INGOT_ARM64_ROOT/usr/include/python3.11"
cmake --build "$home/build"
rm -rf "$home/package"
mkdir -p "$home/package"
cp -r src/ingot "$home/package/"
rm -f "$home"/package/ingot/_native*.so
cp "$home"/build/native/_native*.so "$home/package/ingot/_native.cpython-311-aarch64-linux-gnu.so" # the host's suffix
# qemu-user cannot fork a process that has threads: it ends in an assertion of its own.
# shellcheck disable=SC2086
qemu-aarch64 -L "$INGOT_ARM64_ROOT" -E PYTHONPATH="$home/package:$home/site" -E OPENBLAS_NUM_THREADS=1 \
    "$INGOT_ARM64_ROOT/usr/bin/python3.11" -m pytest -q -p no:cacheprovider --timeout=1800 \
    --deselect tests/unit/native/test_affine_matmul_kernels.py::test_a_forked_process_has_threads_of_its_own \
    ${TESTS:-tests/unit/native}
