"""Calls of the affine kernels on whole rows, shared by decoder and encoder."""

from __future__ import annotations

import numpy as np

from ingot.codecs.affine_params import AffineParams
from ingot.core import native
from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import as_bits, cast_into, float_name
from ingot.core.parallel import for_ranges
from ingot.model.tensor import Array

# Elements per call: enough to make a call's cost vanish, few enough to spread over threads.
STEP = 1 << 20


def layout(params: AffineParams, cols: int) -> native.kernels.AffineLayout:
    """Describe rows of ``cols`` columns to the kernels."""
    return native.kernels.AffineLayout(
        cols=cols,
        group=params.group_columns(cols),
        bits=params.bits,
        signed=params.signed,
        msb=params.msb,
        per_tensor=params.granularity == "tensor",
        row_bytes=params.row_bytes(cols),
    )


def decode_rows(
    params: AffineParams, packed: Array, scales: Array, zeros: Array | None, out: Array, workers: int | None = 1
) -> None:
    """Decode whole rows: ``w = s * (q - z)`` in f32, rounded once to ``out.dtype`` (f32, f16, bf16; f64 holds f32).

    Parameters
    ----------
    packed : u8, rows * row_bytes
    scales, zeros : of ``scale_shape(rows, cols)``, any number of dimensions; f32, f16 or bf16
    out : rows x cols, C order
    workers : int, optional
        Threads; None for as many as there are processors. Small matrices take one.
    """
    rows, cols = out.shape
    if not out.size:
        return
    how = layout(params, cols)
    step = max(1, STEP // cols)
    row_bytes = params.row_bytes(cols)
    flat = packed.reshape(-1).view(np.uint8)
    per_row = 0 if params.granularity == "tensor" else scales.size // rows
    kind = float_name(scales)
    all_scales, all_zeros = as_bits(scales).reshape(-1), None if zeros is None else as_bits(zeros).reshape(-1)

    def part(values: Array, start: int, stop: int) -> Array:
        return values[start * per_row : stop * per_row] if per_row else values

    def run(start: int, stop: int) -> None:
        target = out[start:stop]
        narrow = target if target.dtype != np.float64 else np.empty(target.shape, np.float32)
        native.kernels.affine_dequantize(
            flat[start * row_bytes : stop * row_bytes],
            part(all_scales, start, stop),
            None if all_zeros is None else part(all_zeros, start, stop),
            as_bits(narrow),
            how,
            kind,
            float_name(narrow),
        )
        if narrow is not target:
            cast_into(narrow, target)

    for_ranges(rows, step, run, 1 if out.size < 4 * STEP else workers)


def storage_array(shape: tuple[int, ...], name: str) -> Array:
    """Return an uninitialised array for a part of storage dtype ``name``."""
    return np.empty(shape, numpy_dtype(name))
