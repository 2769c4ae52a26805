"""Checks of a palette's parts, and the codebook of each index (``spec/palette.md``)."""

from __future__ import annotations

from math import prod

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError
from ingot.model.layouts.palette import (
    CODEBOOK,
    ENTRY_DTYPES,
    INDICES,
    RULE,
    SCALE_DTYPES,
    SCALES,
    PaletteLayout,
)
from ingot.model.tensor import Array, Tensor


def run_length(layout: PaletteLayout, shape: tuple[int, ...]) -> int:
    """Return the number of consecutive indices with the same codebook, at least 1."""
    index = layout.index_shape(shape)
    last = max((axis for axis, count in enumerate(layout.groups) if count > 1), default=None)
    return max(1, prod(index) if last is None else index[last] // layout.groups[last] * prod(index[last + 1 :]))


def run_ids(layout: PaletteLayout, shape: tuple[int, ...], first: int, stop: int) -> Array | None:
    """Return the index of the codebook of each run from ``first`` to ``stop``: u32; None if there is only one."""
    if layout.codebooks == 1:
        return None
    index = layout.index_shape(shape)
    last = max(axis for axis, count in enumerate(layout.groups) if count > 1)
    spans = [size // count for size, count in zip(index[:last], layout.groups, strict=False)]
    remaining = np.arange(first, stop, dtype=np.int64)
    remaining, ids = np.divmod(remaining, layout.groups[last])
    stride = layout.groups[last]
    for axis in range(last - 1, -1, -1):
        remaining, position = np.divmod(remaining, index[axis])
        ids += position // spans[axis] * stride
        stride *= layout.groups[axis]
    return ids.astype(np.uint32)


def layout_of(tensor: Tensor) -> PaletteLayout:
    """Check a tensor's layout, and the types and sizes of its parts; return the layout. Reads no part's bytes.

    Raises
    ------
    CodecError
        ``palette.params``, ``palette.vector-size``, ``palette.groups``, ``palette.parts``, ``palette.dtype``,
        ``palette.size``.
    """
    layout = PaletteLayout.from_tensor(tensor)
    if tensor.dtype != layout.dtype:
        raise CodecError(
            RULE, f"expected dtype {tensor.dtype}, the tensor's, found {layout.dtype!r:.80}", where=tensor.name
        )
    if not {INDICES, CODEBOOK} <= set(tensor.parts) <= {INDICES, CODEBOOK, SCALES}:
        raise CodecError(
            "palette.parts",
            f"expected the parts {INDICES}, {CODEBOOK} and perhaps {SCALES}, found "
            f"{', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    check_part(tensor, INDICES, ("u8",), layout.index_bytes(tensor.shape))
    check_codebook(tensor, layout)
    return layout


def check_codebook(tensor: Tensor, layout: PaletteLayout) -> None:
    """Check the types and sizes of codebook and scales; raise ``palette.dtype`` or ``palette.size``."""
    check_part(tensor, CODEBOOK, ENTRY_DTYPES, prod(layout.codebook_shape()))
    if SCALES in tensor.parts:
        check_part(tensor, SCALES, SCALE_DTYPES, layout.codebooks)


def check_part(tensor: Tensor, role: str, dtypes: tuple[str, ...], count: int) -> None:
    """Raise ``CodecError`` ``palette.dtype`` or ``palette.size`` unless a part has ``count`` elements of one of
    ``dtypes``.
    """
    part = tensor.parts[role]
    location = f"{tensor.name}.{role}"
    if part.dtype not in dtypes or part.type not in (None, part.dtype):
        raise CodecError(
            "palette.dtype", f"expected {' or '.join(dtypes)}, found {part.type or part.dtype}", where=location
        )
    nbytes = count * numpy_dtype(part.dtype).itemsize
    if part.nbytes != nbytes:
        raise CodecError(
            "palette.size",
            f"expected {nbytes} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
            where=location,
        )
