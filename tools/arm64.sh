#!/usr/bin/env bash
# Builds the native module for arm64 and runs tests under qemu-user: `make arm64`. Needs from Debian: mmdebstrap,
# g++-aarch64-linux-gnu, and two archives that mmdebstrap reads (bookworm has Python 3.11, trixie a QEMU that forks
# processes with threads); from the package index: wheels for arm64 and Python 3.11. Child processes of tests run there too.
# TESTS says which tests, `make arm64 TESTS=tests/unit/delta`; if nothing is said, those of native code and of what stands
# on it, and of operations a few. Of a test's cases it takes the first and one in four (ONE_IN=1 for all), of examples of
# property tests four, slow tests are left out. torch, transformers, MLX, coremltools and obstore are not there: their tests
# are skipped. spec/instruction_sets.md says more.
set -euo pipefail
cd "$(dirname "$0")/.."
home="${ARM64:-.venv.arm64}" python="${PYTHON:-python3}" debian="${SUITE:-bookworm}" newer="${QEMU_SUITE:-trixie}"
mkdir -p "$home"
home="$(realpath "$home")"
export INGOT_ARM64_ROOT="$home/root"

if [ ! -e "$home/.root" ]; then
    rm -rf "$INGOT_ARM64_ROOT"
    mmdebstrap --architectures=arm64 --variant=extract --include=python3.11-minimal,libpython3.11-stdlib \
        --include=libpython3.11-dev,libstdc++6,libgomp1,libffi8,libssl3,zlib1g,libexpat1,libbz2-1.0,liblzma5 \
        --include=libsqlite3-0,libuuid1,ca-certificates "$debian" "$INGOT_ARM64_ROOT"
    touch "$home/.root"
fi
if [ ! -e "$home/.qemu" ]; then
    rm -rf "$home/qemu"
    mmdebstrap --variant=extract --include=qemu-user "$newer" "$home/qemu"
    touch "$home/.qemu"
fi
if [ ! -e "$home/.site" ]; then
    "$python" tools/requirements.py core runner > "$home/requirements.txt"
    "$python" tools/requirements.py test | grep -E '^(safetensors|ztensor|cbor2|zstandard|gguf|astc-encoder-py|scipy)[=>]' > "$home/test.txt"
    wheels=(--quiet --target "$home/site" --upgrade --only-binary :all: --python-version 3.11)
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do wheels+=(--platform "${tag}_aarch64"); done
    "$python" -m pip install "${wheels[@]}" -r "$home/requirements.txt" -r "$home/test.txt"
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

# What sys.executable is there: the kernel knows no program of arm64, so a script of the host starts it.
cat > "$home/python" << END
#!/bin/sh
exec "$home/qemu/usr/bin/qemu-aarch64" -L "$INGOT_ARM64_ROOT" -0 "$home/python" "$INGOT_ARM64_ROOT/usr/bin/python3.11" "\$@"
END
chmod +x "$home/python"
# A processor with dot products and without SVE, of which OpenBLAS' kernels leave marks of divisions by zero under QEMU.
export QEMU_CPU="${QEMU_CPU:-neoverse-n1}"
default="tests/unit/native tests/unit/codecs tests/unit/quantization tests/unit/core tests/unit/model tests/unit/stores tests/unit/formats"
default+=" tests/unit/conversion/test_small_values.py tests/unit/artifacts/test_open_save.py tests/unit/conversion/test_convert.py"
default+=" tests/unit/conversion/test_repack.py tests/unit/views"
# shellcheck disable=SC2086
PYTHONHOME=/usr PYTHONPATH="$home/package:$home/site" OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    "$home/python" -m pytest -q ${PARALLEL:-} -p no:cacheprovider --timeout=1800 --hypothesis-profile=few --durations=10 \
    --one-in "${ONE_IN:-4}" -m 'not slow' ${TESTS:-$default}
