"""Conversion between ggml's blocks and the parts of other families (``spec/gguf.md``, "Repacking")."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np

from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import as_bits, float_name, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS
from ingot.model.layouts.alternatives import AFFINE, CODEBOOKS, UNPACKED
from ingot.model.layouts.ggml import TYPES
from ingot.model.layouts.scaled_codebook import INDICES, ScaledCodebookLayout
from ingot.model.tensor import Array, Tensor

INCOMPATIBLE_SCALES: Mapping[str, Array] = {
    "mxfp4": np.array([255], np.uint8),
    "nvfp4": np.array([0x7F, *range(0x81, 0x100)], np.uint8),
}
"""For each type, bytes of scales that ggml's blocks and the small float type decode to different numbers.

In MXFP4, blocks decode E8M0's NaN as 2^128. In NVFP4, blocks decode E4M3's NaN as 0 and ignore the sign of scales.
"""


def unpack(block_type: str, blocks: Array) -> dict[str, Array]:
    """Convert blocks (u8) to the parts of ``UNPACKED[block_type]``, each an array of its storage dtype.

    Small-float scales are returned as bytes.
    """
    layout, (elements, nbytes, _) = UNPACKED[block_type], TYPES[block_type]
    count = blocks.size // nbytes
    (codes, *numbers) = layout.part_specs((1, count * elements))
    out = [scratch((count * elements * layout.bits // 8,), np.uint8)]
    out += [np.empty(part.length or 0, np.uint8) for part in numbers]
    native.kernels.ggml_unpack(block_type, blocks[: count * nbytes], out[0], out[1], out[2] if len(out) == 3 else None)
    typed = (part.view(numpy_dtype(spec.dtype)) for part, spec in zip(out[1:], numbers, strict=True))
    return {codes.role: out[0], **dict(zip((part.role for part in numbers), typed, strict=True))}


def extract_part(block_type: str, blocks: Array, role: str) -> Array:
    """Return one of the parts that ``unpack`` returns; without unpacking if it is contiguous in each block."""
    codes, *specs = UNPACKED[block_type].part_specs((1, TYPES[block_type].elements))
    if role == codes.role or (block_type not in AFFINE and block_type not in CODEBOOKS):
        return unpack(block_type, blocks)[role]
    sizes = [spec.length or 0 for spec in specs]
    index = [spec.role for spec in specs].index(role)
    start = sum(sizes[:index])
    nbytes = TYPES[block_type].nbytes
    size = sizes[index]
    unit = gcd(nbytes, start, size, 4)  # NumPy copies numbers in one call, but runs of bytes one by one
    part = blocks.view(f"u{unit}").reshape(-1, nbytes // unit)[:, start // unit : (start + size) // unit]
    return np.ascontiguousarray(part).reshape(-1).view(numpy_dtype(specs[index].dtype))


def pack(block_type: str, parts: dict[str, Array]) -> Array:
    """Convert parts, as ``unpack`` returns them, to blocks (u8)."""
    layout, (elements, nbytes, _) = UNPACKED[block_type], TYPES[block_type]
    codes = parts[INDICES if isinstance(layout, ScaledCodebookLayout) else CODES]
    scales = parts[SCALES].view(np.uint8)
    minima = parts.get(ZEROS)
    low = None if minima is None else minima.view(np.uint8)
    count = codes.size * 8 // layout.bits // elements
    blocks = scratch((count * nbytes,), np.uint8)
    native.kernels.ggml_pack(block_type, codes, scales, low, blocks)
    return blocks


def why_incompatible(block_type: str, scales: Array) -> str | None:
    """Return a message if a scale's byte has another value in blocks than in the small float type, else None."""
    if block_type not in INCOMPATIBLE_SCALES or not scales.size:
        return None
    seen = np.flatnonzero(np.bincount(scales.reshape(-1), minlength=256))
    incompatible = np.intersect1d(seen, INCOMPATIBLE_SCALES[block_type])
    return f"the scale 0x{incompatible[0]:02X} differs in blocks of {block_type}" if incompatible.size else None


def source_changed(tensor: Tensor) -> IntegrityError:
    """Return the error for scales that changed since an earlier read."""
    return IntegrityError(
        "store.changed",
        "the scales differ from an earlier read: the source changed meanwhile; run again",
        where=tensor.name,
    )


def as_f16(numbers: Array) -> Array | None:
    """Convert f32 numbers to f16; return None if f16 cannot represent one of them exactly."""
    small = np.empty(numbers.shape, np.float16)
    same = native.kernels.affine_same(as_bits(numbers), float_name(numbers), written(small), "f16")
    return small if same else None
