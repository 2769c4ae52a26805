"""How scales lie over a tensor: Core ML's scale shapes to the affine codec's parameters, and back (spec/coreml.md).

Core ML gives scales the rank of the data: along each dimension, ``size / scales`` elements share one. The affine codec
counts runs of consecutive elements where it can, which other containers know too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ingot.formats.coreml.types import MilType

Shape = tuple[int, ...]


def affine_params(shape: Shape, scales: Shape, type: MilType, dtype: str, zeros: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a ``quantized_group`` tensor of packed codes with such scales.

    Parameters
    ----------
    shape : tuple of int
        Of the tensor.
    scales : tuple of int
        As many sizes, each a divisor of the tensor's.
    type : MilType
        Of the codes, signed or not.
    dtype : str
        Logical element type.
    zeros : mapping
        ``zeros``, and ``zero_point`` where there is one for all.
    """
    granularity, matrix = _granularity(shape, scales)
    cols = matrix[1] if matrix else shape[-1] if shape else 1
    return {
        "codec_version": 1,
        "bits": type.bits,
        **granularity,
        "axis": -1,
        "packing": "rows_lsb" if cols * type.bits % 8 == 0 else "flat_lsb",
        "signed": type.signed,
        "dtype": dtype,
        **zeros,
        **({"matrix": list(matrix)} if matrix else {}),
    }


def _granularity(shape: Shape, scales: Shape) -> tuple[dict[str, Any], Shape | None]:
    """Return granularity with its numbers, and how the row-major order is cut, if not as the tensor itself is."""
    size, count = prod(shape), prod(scales)
    if count == 1:
        return {"granularity": "tensor"}, None
    axis = run_axis(shape, scales)
    if axis is None or not size:
        return {"granularity": "blocks", "block": [one // of for one, of in zip(shape, scales, strict=True)]}, None
    run, own = size // count, shape[-1]
    if run == own:
        return {"granularity": "row"}, None
    if own % run == 0:
        return {"granularity": "group", "group_size": run}, None
    cols = prod(shape[axis:]) if run != prod(shape[axis:]) and axis else run
    matrix = (size // cols, cols)
    return ({"granularity": "row"} if run == cols else {"granularity": "group", "group_size": run}), matrix


def run_axis(shape: Shape, scales: Shape) -> int | None:
    """Return the dimension along which runs of elements share scales; None where they do not lie one after the other.

    Before it each index has scales of its own, behind it none has.
    """
    axis = next((index for index, (size, own) in enumerate(zip(shape, scales, strict=True)) if size != own), len(shape))
    behind = all(own == 1 for own in scales[axis + 1 :])
    if not behind:
        return None
    # Trailing dimensions of size 1 that have "scales of their own" belong to the run as well.
    return min(axis, len(shape) - 1)


def scale_dims(params: Mapping[str, Any], shape: Shape) -> Shape | None:
    """Return the shape of Core ML's scales for a ``quantized_group`` tensor; None where it has none."""
    granularity = params.get("granularity")
    if granularity == "tensor":
        return (1,) * len(shape)
    if granularity == "blocks":
        block = params.get("block") or ()
        return (
            tuple(size // step for size, step in zip(shape, block, strict=False)) if len(block) == len(shape) else None
        )
    matrix = params.get("matrix")
    cols = int(matrix[1]) if matrix else shape[-1] if shape else 1
    run = cols if granularity == "row" else int(params.get("group_size") or 0)
    if not run or cols % run:
        return None
    return _dims_of_run(shape, run)


def _dims_of_run(shape: Shape, run: int) -> Shape | None:
    """Return the scale shape in which every ``run`` consecutive elements share one."""
    dims, left = [1] * len(shape), run
    for axis in range(len(shape) - 1, -1, -1):
        size = shape[axis]
        if left == 1:
            dims[axis] = size
        elif left >= size and left % size == 0:
            left //= size
        elif size % left == 0:
            dims[axis], left = size // left, 1
        else:
            return None
    return tuple(dims) if left == 1 else None


def stream_is_flat(params: Mapping[str, Any], shape: Shape) -> bool:
    """Whether the codes are one bit stream, low bits first, without padding between rows."""
    matrix = params.get("matrix")
    cols = int(matrix[1]) if matrix else shape[-1] if shape else 1
    packing = params.get("packing")
    return packing == "flat_lsb" or (packing == "rows_lsb" and cols * int(params.get("bits", 0)) % 8 == 0)
