"""ggml's blocks taken apart into the parts of another family, and put together (``spec/gguf.md``, "Repacking")."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np

from ingot.core import native
from ingot.core.buffers import scratch
from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import as_bits, float_name, written
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS
from ingot.model.layouts.families import AFFINE, CODEBOOKS, OWN
from ingot.model.layouts.ggml import TYPES
from ingot.model.layouts.scaled_codebook import INDICES, ScaledCodebookLayout
from ingot.model.tensor import Array, Tensor

STRANGE: Mapping[str, Array] = {
    "mxfp4": np.array([255], np.uint8),
    "nvfp4": np.array([0x7F, *range(0x81, 0x100)], np.uint8),
}
"""Bytes of scales that mean something else in blocks than as the small floats that they are.

In MXFP4 2^128, where E8M0 has NaN; in NVFP4 0 for E4M3's NaN, and numbers without their sign.
"""


def unpack(kind: str, blocks: Array) -> dict[str, Array]:
    """Take blocks (u8) of a type of ``OWN`` apart: the parts of that layout, as its storage types.

    Scales that are small floats are their bytes.
    """
    own, (elements, nbytes, _) = OWN[kind], TYPES[kind]
    count = blocks.size // nbytes
    (codes, *numbers) = own.part_specs((1, count * elements))
    out = [scratch((count * elements * own.bits // 8,), np.uint8)]
    out += [np.empty(part.length or 0, np.uint8) for part in numbers]
    native.kernels.ggml_unpack(kind, blocks[: count * nbytes], out[0], out[1], out[2] if len(out) == 3 else None)
    typed = (part.view(numpy_dtype(spec.dtype)) for part, spec in zip(out[1:], numbers, strict=True))
    return {codes.role: out[0], **dict(zip((part.role for part in numbers), typed, strict=True))}


def taken(kind: str, blocks: Array, role: str) -> Array:
    """Return one of the parts that ``unpack`` returns; scales and minima that lie before the codes without these."""
    codes, *specs = OWN[kind].part_specs((1, TYPES[kind].elements))
    if role == codes.role or (kind not in AFFINE and kind not in CODEBOOKS):
        return unpack(kind, blocks)[role]
    sizes, index = [spec.length or 0 for spec in specs], [spec.role for spec in specs].index(role)
    start = sum(sizes[:index])
    nbytes, size = TYPES[kind].nbytes, sizes[index]
    each = gcd(nbytes, start, size, 4)  # NumPy takes a call for each run of bytes, and none for numbers
    found = blocks.view(f"u{each}").reshape(-1, nbytes // each)[:, start // each : (start + size) // each]
    return np.ascontiguousarray(found).reshape(-1).view(numpy_dtype(specs[index].dtype))


def pack(kind: str, parts: dict[str, Array]) -> Array:
    """Put blocks (u8) together from what ``unpack`` returns."""
    own, (elements, nbytes, _) = OWN[kind], TYPES[kind]
    codes = parts[INDICES if isinstance(own, ScaledCodebookLayout) else CODES]
    scales, minima = parts[SCALES].view(np.uint8), parts.get(ZEROS)
    low = None if minima is None else minima.view(np.uint8)
    count = codes.size * 8 // own.bits // elements
    blocks = scratch((count * nbytes,), np.uint8)
    native.kernels.ggml_pack(kind, codes, scales, low, blocks)
    return blocks


def strange(kind: str, scales: Array) -> str | None:
    """Return why bytes of scales cannot go from blocks to small floats or back; None if they mean the same in both."""
    if kind not in STRANGE or not scales.size:
        return None
    seen = np.flatnonzero(np.bincount(scales.reshape(-1), minlength=256))
    found = np.intersect1d(seen, STRANGE[kind])
    return f"the scale 0x{found[0]:02X} is another number in blocks of {kind}" if found.size else None


def changed(tensor: Tensor) -> IntegrityError:
    """Return the error for scales that were others when they were read before."""
    return IntegrityError(
        "store.changed",
        "expected the scales that were read before, found others: the source changed",
        where=tensor.name,
    )


def as_f16(numbers: Array) -> Array | None:
    """Return f32 numbers as f16; None unless each is the same."""
    small = np.empty(numbers.shape, np.float16)
    same = native.kernels.affine_same(as_bits(numbers), float_name(numbers), written(small), "f16")
    return small if same else None
