"""Make the golden corpus of kernel units: tests/golden/anek, and a folder of a whole model in it.

    python tests/golden/make_anek.py [FOLDER]

Numbers are small and made by arithmetic. ``test_anek_corpus.py`` reads the units by the page alone.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np

from ingot.ext.ane.chips.activation import ActivationLut
from ingot.ext.ane.chips.chips import load_chip
from ingot.ext.ane.kernel_units.header import seal, stored_digest
from ingot.ext.ane.kernel_units.index import INDEX, Index
from ingot.ext.ane.kernel_units.pack import KernelWeight, pack_unit

FOLDER = Path(__file__).parent / "anek"
SHAPE = (20, 6)


def weights() -> dict[str, tuple[str, KernelWeight]]:
    """Return the chip and the weight of every unit."""
    count = np.arange(120)
    halves = ((count * 37 % 64 - 32) / 16).astype(np.float16).reshape(SHAPE)
    codes = (count * 53 % 255 - 127).astype(np.int8).reshape(SHAPE)
    mask = (count * 7 % 5 < 2).reshape(SHAPE)
    indices = (count * 11 % 16).astype(np.uint8).reshape(SHAPE)
    scale = (np.arange(1, 21) / 64).astype(np.float16)
    books = ((np.arange(32) - 16) / 8).astype(np.float16).reshape(2, 16, 1)
    pairs = ((np.arange(32) - 16) / 8).astype(np.float16).reshape(1, 16, 2)
    knots = (np.arange(-16, 17) / 2).astype(np.float16)  # of the identity from -8 to 8
    tails = np.array([0, -8, 0, 8], np.float16)
    lut = ActivationLut(np.float16(-8), np.float16(8), np.float16(0), np.float16(1), knots, tails)
    kept = np.where(mask, indices, np.uint8(0))
    return {
        "fp16-h13": ("m1", KernelWeight(SHAPE, halves, 16, bias=scale, lut=lut)),
        "fp16-convolution": ("m4", KernelWeight((5, 2, 3, 4), halves.reshape(5, 2, 3, 4), 16)),
        "int8-h13": ("m1", KernelWeight(SHAPE, codes, 8, scale=scale)),
        "int8-single": ("m4", KernelWeight(SHAPE, codes, 8, scale=(np.arange(1, 21) / 30).astype(np.float32))),
        "int8-zeros": ("m4", KernelWeight(SHAPE, codes, 8, scale=scale, zero=np.arange(-9, 11).astype(np.int8))),
        "int8-blocks": ("m4", KernelWeight(SHAPE, codes, 8, scale=np.outer(scale, [1, 2]).astype(np.float16), block=4)),
        "e4m3": ("m6", KernelWeight(SHAPE, (count % 127).astype(np.uint8).reshape(SHAPE), 8)),
        "palette4": ("m4", KernelWeight(SHAPE, indices, 4, books)),
        "palette4-scaled": ("m4", KernelWeight(SHAPE, indices, 4, books, scale=np.repeat(scale[:2], 10))),
        "palette4-pairs": ("m6", KernelWeight(SHAPE, indices[::2], 4, pairs)),
        "sparse": ("m1", KernelWeight(SHAPE, np.where(mask, halves, np.float16(0)), 16, mask=mask)),
        "sparse-palette4": ("m4", KernelWeight(SHAPE, kept, 4, books, mask)),
        "unity": ("m1", KernelWeight((20, 20), np.zeros(0, np.float16), 16, scale=scale, unity=True)),
    }


def first_version(data: bytes) -> bytes:
    """Return a unit as version 1 had it: without a kernel word."""
    old = bytearray(data)
    struct.pack_into("<I", old, 8, 1)
    struct.pack_into("<I", old, 48, 0)
    seal(old)
    return bytes(old)


def corpus() -> dict[str, bytes]:
    """Return every file by its path."""
    units = {name: pack_unit(weight, load_chip(chip)) for name, (chip, weight) in weights().items()}
    files = {f"{name}.anek": data for name, data in units.items()}
    files["version-1.anek"] = first_version(units["palette4"])
    model = {"a.q.weight": "palette4", "a.k.weight": "sparse-palette4"}
    named = {name: (f"{name}.anek", stored_digest(units[unit])) for name, unit in model.items()}
    files[f"model/{INDEX}"] = Index("m4", load_chip("m4").target, named, {"a.v.weight": "a reason"}).to_bytes()
    return {**files, **{f"model/{name}.anek": units[unit] for name, unit in model.items()}}


def main() -> None:
    """Write the corpus."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, data in corpus().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
