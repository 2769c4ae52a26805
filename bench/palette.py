"""Palettes and masks: codebooks beside coremltools 9.0, look-ups and masks beside memcpy, in the same run.

    python bench/palette.py --json palette.json

Times are processor seconds of this process, threads included: other work on the machine does not count. ``--skip-peer``
leaves coremltools out. Decoding runs on one thread; it takes turns with memcpy of the same output, best of each.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from clock import turns
from kernels import Row, entry, memcpy, table, touched
from peak import watch

from ingot.codecs.palette.codec import lookup_of
from ingot.codecs.palette.params import layout_of
from ingot.codecs.table import CODECS
from ingot.core.runtime import native
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor

PALETTE, MASK = CODECS["palette"], CODECS["sparse_mask"]
WAYS = (
    ("4 bits, tensor", {"bits": 4}, [0, 0]),
    ("4 bits, 16 channels", {"bits": 4, "group": 16}, [16, 0]),
    ("8 bits, tensor", {"bits": 8}, None),
    ("8 bits, 16 channels", {"bits": 8, "group": 16}, None),
    ("6 bits, tensor", {"bits": 6}, None),
    ("6 bits, pairs", {"bits": 6, "vector": 2}, None),
)
PROGRAM = """
import numpy as np
from ingot.codecs.table import CODECS
from ingot.testing.codecs import encode_parts
weights, rng = np.empty((2048, 2048), np.float16), np.random.default_rng(0)
for row in weights:  # one by one, so that making them leaves no memory behind for encoding
    row[...] = rng.standard_normal(2048, np.float32)
codec, options = CODECS["palette"], {options}
if options is not None:
    encode_parts(codec, codec.encoder(weights.shape, "f16", options), weights, range(512, 2048, 512))
"""


def processor(call: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Least processor seconds of ``repeat`` calls, and what the last returned."""
    best, found = float("inf"), None
    for _ in range(repeat):
        start = time.process_time()
        found = call()
        best = min(best, time.process_time() - start)
    return best, found


def squared_error(weights: np.ndarray, decoded: np.ndarray) -> float:
    return float(((weights.astype(np.float64) - decoded.astype(np.float64)) ** 2).sum())


def peer(weights: np.ndarray, bits: int, blocks: list[int]) -> tuple[float, float]:
    """Seconds and squared error of coremltools' k-means."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from coremltools.optimize.coreml._quantization_passes import palettize_weights

    seconds, found = processor(lambda: palettize_weights.blockwise_compress(weights, "KMEANS", bits, blocks), 1)
    lut = found.lut.reshape(-1, 2**bits)
    indices = found.indices.reshape(len(lut), -1)
    return seconds, squared_error(weights, np.take_along_axis(lut, indices, axis=1).reshape(weights.shape))


def codebooks(weights: np.ndarray, repeat: int, with_peer: bool) -> list[Row]:
    rows = []
    for name, options, blocks in WAYS:
        seconds, tensor = processor(lambda: encode_tensor(PALETTE, weights, options, dtype="f16"), repeat)  # noqa: B023
        error = squared_error(weights, tensor.numpy("f32"))
        rows.append(entry(f"palette {name}", weights.size / seconds / 1e6, "M weights/s", None, None))
        rows[-1] |= {"seconds": seconds, "squared_error": error}
        if not with_peer or blocks is None:
            continue
        theirs, their_error = peer(weights, options["bits"], blocks)
        ratio = theirs / seconds
        rows.append(entry(f"  beside coremltools {name}", weights.size / theirs / 1e6, "M weights/s", ratio, 50.0))
        rows[-1] |= {"seconds": theirs, "squared_error": their_error}
        rows.append(entry("  their squared error / ours", their_error / error, "", None, 1.0))
    return rows


def memory() -> list[Row]:
    """Peak memory of encoding 2048 x 2048 f16 weights of 8.4 MB beyond having them: at most as much again and 50 MB."""
    base = watch([sys.executable, "-c", PROGRAM.replace("{options}", "None")]).peak_anonymous
    rows = []
    for name, options, _ in WAYS[:4]:
        run = watch([sys.executable, "-c", PROGRAM.replace("{options}", repr(options))])
        extra = (run.peak_anonymous - base) / 1e6
        rows.append(
            entry(f"memory of palette {name}", extra, "MB", None, None) | {"met": run.code == 0 and extra < 58.4}
        )
    return rows


def look_ups(weights: np.ndarray, repeat: int) -> list[Row]:
    out, copy = touched(weights.shape, "f16"), touched(weights.shape, "f16")
    rows = []
    for name, options, _ in WAYS[:5]:
        tensor = encode_tensor(PALETTE, weights, options, dtype="f16")
        lookup, packed = lookup_of(tensor, layout_of(tensor), "f16"), tensor.parts["indices"].array()
        plain, ours = turns(repeat, memcpy(out, copy), lambda: lookup.all(packed, out.reshape(-1)))  # noqa: B023
        rows.append(entry(f"decode palette {name} to f16", out.nbytes / ours / 1e9, "GB/s", plain / ours, 0.7))
    return rows


def masks(weights: np.ndarray, repeat: int) -> list[Row]:
    rows = []
    out = np.empty(weights.shape, np.float16)

    def read(tensor: Tensor) -> None:
        reader = MASK.reader(tensor)
        reader.read_into(out)
        reader.finish()

    for name, options in (
        ("f16", {}),
        ("palette 4 bits", {"inner": "palette"}),
        ("int8", {"inner": "affine", "options": {"bits": 8}}),
    ):
        tensor = encode_tensor(MASK, weights, {**options, "sparsity": 0.63}, dtype="f16")
        seconds = processor(lambda: read(tensor), repeat)[0]  # noqa: B023
        target = 3.0 if name == "f16" else None
        rows.append(entry(f"decode mask and {name}, 63 % zeros", out.nbytes / seconds / 1e9, "GB/s", None, target))
        if name == "f16":
            share = tensor.nbytes / weights.nbytes
            exact = tensor.nbytes == weights.size // 8 + 2 * tensor.params["nnz"]
            rows.append(entry("  stored / dense", share, "", None, None) | {"met": exact})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa())
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    small = np.random.default_rng(0).normal(0, 0.02, (2048, 2048)).astype(np.float16)
    large = np.random.default_rng(0).normal(0, 0.02, (8192, 4096)).astype(np.float16)
    rows = [
        *codebooks(small, min(arguments.repeat, 3), not arguments.skip_peer),
        *memory(),
        *look_ups(large, arguments.repeat),
        *masks(large, arguments.repeat),
    ]
    print(f"instruction set {arguments.isa}; codebooks and memory 2048 x 2048 f16, the rest 8192 x 4096, one thread")
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"isa": arguments.isa, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
