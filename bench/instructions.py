"""Instructions that kernels take for an element on arm64, counted under qemu-user: no time is known there.

    make arm64 TESTS=tests/unit/native/test_float_kernels.py    # builds .venv.arm64, which is used here
    python bench/instructions.py --json now.json
    python bench/instructions.py --package other/package --json before.json
    python bench/instructions.py --table before.json now.json

This program starts itself under qemu, with a plugin (bench/instructions.c) that counts what is executed; a call is
counted as the second of two, less what Python takes for none. Instructions are not time: a look-up in four registers
is one, and takes several cycles on some processors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
COUNT = 1 << 16  # elements
COLUMNS = 1024
MARK = "instructions "
Case = tuple[str, int, Callable[[], Any]]


def casts(rng: np.random.Generator) -> Iterator[Case]:
    from ingot.core.numeric.dtypes import cast, cast_into

    wide = rng.normal(0, 1, COUNT).astype(np.float32)
    for source, dtype in (("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f32"), ("bf16", "f16")):
        values, out = cast(wide, source), cast(wide, dtype)
        yield f"{source} to {dtype}", COUNT, partial(cast_into, values, out)


def look_ups(rng: np.random.Generator) -> Iterator[Case]:
    from ingot.core.runtime import native

    codes = rng.integers(0, 256, COUNT, np.uint8)
    for bits in (3, 4, 5, 6, 7):
        packed = codes[: COUNT * bits // 8]
        yield f"unpack {bits} bits", COUNT, partial(native.kernels.palette_unpack, packed, bits, codes.copy())
    for bits, word in ((2, np.uint16), (4, np.uint16), (6, np.uint16), (8, np.uint16), (4, np.uint32)):
        table = rng.integers(0, 1 << 15, (1, 1 << bits)).astype(word)
        packed, out = codes[: COUNT * bits // 8], np.empty(COUNT, word)
        label = f"palette of {bits} bits to {8 * out.itemsize} bits"
        run = partial(native.kernels.palette_decode, packed, bits, table, None, COUNT, 0, out)
        yield label, COUNT, run


def scaled(rng: np.random.Generator) -> Iterator[Case]:
    from ingot.codecs.scaled_codebook.codec import ScaledCodebookCodec
    from ingot.codecs.scaled_codebook.decode import ArrayWindow, decoder_of
    from ingot.core.numeric.dtypes import numpy_dtype
    from ingot.testing.codecs import encode_tensor

    weights = rng.normal(0, 0.05, (COUNT // COLUMNS, COLUMNS)).astype(np.float32)
    kinds = (
        ("NF4 g64", {}, ("bf16", "f16", "f32")),
        ("NVFP4", {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn", "second": "multiply"}, ("bf16",)),
        ("FP8 E4M3", {"table": "f8_e4m3fn", "group": [64, 128]}, ("bf16", "f16", "f32")),
        ("FP6 E2M3", {"table": "f6_e2m3fn", "group": 32, "scales": "f8_e8m0fnu"}, ("bf16",)),
    )
    for name, options, targets in kinds:
        tensor = encode_tensor(ScaledCodebookCodec(), weights, options, dtype="f32")
        for dtype in targets:
            out = np.empty(weights.shape, numpy_dtype(dtype))
            decoder = decoder_of(tensor, tensor.layout, {"scales": ArrayWindow(tensor.parts["scales"].array())})
            indices = tensor.parts["indices"].array()
            yield f"{name} to {dtype}", COUNT, partial(decoder.decode, indices, 0, out, "low_first")


def affine(rng: np.random.Generator) -> Iterator[Case]:
    from ingot.codecs.affine.codec import AffineCodec
    from ingot.codecs.affine.rows import decode_rows
    from ingot.core.numeric.dtypes import as_bits, numpy_dtype
    from ingot.core.runtime import native
    from ingot.model.layouts.affine import AffineLayout
    from ingot.testing.codecs import encode_tensor

    weights = rng.normal(0, 0.05, (COUNT // COLUMNS, COLUMNS)).astype(np.float32)
    for name, options in (
        ("INT4 g128", {"bits": 4, "group": 128}),
        ("INT4 g32", {"bits": 4, "group": 32}),
        ("INT3 g128", {"bits": 3, "group": 128}),
        ("INT8 rows", {"bits": 8}),
    ):
        tensor = encode_tensor(AffineCodec(), weights, options, dtype="f32")
        parts = {role: part.array() for role, part in tensor.parts.items()}
        layout = AffineLayout.from_tensor(tensor)
        for dtype in ("bf16", "f16", "f32") if "g32" not in name else ("f16",):
            out = np.empty(weights.shape, numpy_dtype(dtype))
            run = partial(decode_rows, layout, parts["packed_weight"], parts["scales"], None, out)
            yield f"{name} to {dtype}", COUNT, run
    base, out = rng.normal(0, 1, (2, COUNT)).astype(numpy_dtype("bf16"))
    table, packed = rng.normal(0, 1, 16).astype(np.float32), rng.integers(0, 256, COUNT // 2, np.uint8)
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    run = partial(
        native.kernels.int4_add, packed, 0, table, *none, False, as_bits(base), as_bits(out), None, False, "bf16"
    )
    yield "add a .wdelta of 4 bits to bf16", COUNT, run
    for word in (np.uint16, np.uint32):
        yield (
            f".wdelta of 4 bits to {8 * np.dtype(word).itemsize} bits",
            COUNT,
            partial(
                native.kernels.int4_decode,
                packed,
                0,
                np.arange(16, dtype=word),
                *none_of(word),
                False,
                np.empty(COUNT, word),
            ),
        )


def none_of(word: Any) -> tuple[Any, Any]:
    return np.empty(0, np.int64), np.empty(0, word)


def masks(rng: np.random.Generator) -> Iterator[Case]:
    from ingot.core.runtime import native

    mask = rng.integers(0, 256, COUNT // 8, np.uint8)
    kept = int(np.unpackbits(mask).sum())
    for word in (np.uint8, np.uint16, np.uint32):
        bits, values, out = 8 * np.dtype(word).itemsize, np.ones(COUNT, word), np.empty(COUNT, word)
        yield f"mask: place {bits} bits", COUNT, partial(native.kernels.mask_expand, mask, values[:kept].copy(), out)
    values, out = np.ones(COUNT, np.uint16), np.empty(kept, np.uint16)
    yield "mask: take 16 bits", COUNT, partial(native.kernels.mask_select, mask, values, out)
    yield "mask: clear 16 bits", COUNT, partial(native.kernels.mask_clear, mask, values)


def bitmaps(rng: np.random.Generator) -> Iterator[Case]:
    from ingot.codecs.lossless.tca_tbe import TcaCodec
    from ingot.core.numeric.dtypes import numpy_dtype

    weights = rng.normal(0, 0.05, (COUNT // COLUMNS, COLUMNS)).astype(numpy_dtype("bf16"))
    encoder = TcaCodec().encoder(weights.shape, "bf16", {})
    encoder.fit_pass(weights)
    parts = encoder.encode(weights)
    yield "tca_tbe encode", COUNT, partial(encoder.encode, weights)
    yield "tca_tbe decode", COUNT, partial(encoder.decode, parts, np.empty_like(weights))


def products(rng: np.random.Generator) -> Iterator[Case]:
    from dataclasses import replace

    from ingot.model.layouts.affine import ROW

    sys.path.append(str(HERE.parents[1]))
    from tests.support.packed import PLAIN, matrix

    for name, params in (("INT4 g32", PLAIN), ("INT8 rows", replace(PLAIN, bits=8, grid=ROW))):
        held = matrix(params, COUNT // COLUMNS, COLUMNS, "f32", 1)
        for rows in (1, 4, 64):
            x = rng.normal(0, 1, (rows, COLUMNS)).astype(np.float32)
            out = np.empty((rows, COUNT // COLUMNS), np.float32)
            for dots in (False, True):
                way = "sdot" if dots else "no sdot"
                run = partial(held.int8, x, out, None, 1, dots=dots)
                yield f"product in 8 bits, {name}, {rows} rows, {way}", COUNT * rows, run


PARTS = (casts, look_ups, scaled, affine, masks, bitmaps, products)


def mark() -> None:
    try:
        os.close(-7)
    except OSError:
        return


def inside() -> None:
    """Run the cases: the plugin says a count at each mark."""
    rng = np.random.default_rng(0)
    for part in PARTS:
        try:
            for name, elements, run in part(rng):
                run()
                print(json.dumps([name, elements]), file=sys.stderr, flush=True)
                mark()
                mark()
                run()
                mark()
        except (ImportError, ValueError, TypeError) as error:
            print(f"{part.__name__}: {error!r}", file=sys.stderr, flush=True)


def outside(home: Path, package: Path) -> dict[str, float]:
    """Return instructions for an element by the case's name."""
    root, found = home / "root", {}
    with tempfile.TemporaryDirectory() as folder:
        plugin = Path(folder, "count.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, HERE.with_suffix(".c")], check=True)
        command = [
            "qemu-aarch64",
            "-plugin",
            str(plugin),
            "-L",
            str(root),
            f"{root}/usr/bin/python3.11",
            str(HERE),
            "--inside",
        ]
        environment = {
            **os.environ,
            "PYTHONHOME": "/usr",
            "PYTHONPATH": f"{package}:{home}/site",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        told = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False).stderr
    lines = iter(told.splitlines())
    for line in lines:
        if line.startswith("["):
            name, elements = json.loads(line)
            first, second, last = (int(next(lines).removeprefix(MARK)) for _ in range(3))
            found[name] = round((last - second - (second - first)) / elements, 3)
        else:
            print(line, file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--home", type=Path, default=Path(".venv.arm64"), help="what `make arm64` made (default %(default)s)"
    )
    parser.add_argument(
        "--package", type=Path, help="the folder of the package `ingot` for arm64; default: HOME/package"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--table", type=Path, nargs=2, metavar=("BEFORE", "NOW"), help="print two such files side by side"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return inside()
    if arguments.table:
        before, found = (json.loads(path.read_text()) for path in arguments.table)
    else:
        home = arguments.home.resolve()
        before, found = {}, outside(home, (arguments.package or home / "package").resolve())
    for name, value in found.items():
        print(f"{name:48}{before.get(name, ''):>8}{value:8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
