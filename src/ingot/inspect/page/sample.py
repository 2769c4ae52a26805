"""Compute histograms of samples of tensors, and levels: the distinct values of tensors that are stored as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.core.numeric.dtypes import FLOATS
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array, Tensor
from ingot.naming.names import role_of

BINS = 64
_VALUES = 1 << 16
_SLICES = 8
_MAX_ROW = 1 << 22  # elements per index of the first dimension; tensors with more get no histogram
_RUN = 64
_LEVELS = 256
_MAX_EDGE = float(np.finfo(np.float64).max) / 4  # a histogram spans twice as much, which must not overflow


@dataclass(frozen=True, slots=True)
class Histogram:
    """The numbers of sampled values in each of ``BINS`` equal bins from ``low`` to ``high``.

    Values outside this range count in the first or the last bin. ``reference`` are the counts for the same tensor of A;
    None without A. ``levels`` are the distinct values among the first ``run`` values of the first row. They are empty
    if there are too many for a tensor of codes.
    """

    name: str
    codec: str
    low: float
    high: float
    values: int
    counts: Sequence[int]
    reference: Sequence[int] | None = None
    levels: Sequence[float] = ()
    run: int = 0


def select_tensors(tensors: Mapping[str, Tensor], errors: Mapping[str, float], count: int) -> list[str]:
    """Return the names of ``count`` tensors for histograms.

    First come the largest tensor of each role and codec, then tensors with the largest errors, then the largest
    tensors.
    """
    names = [name for name, tensor in tensors.items() if tensor.dtype in FLOATS and _is_small(tensor)]
    by_size = sorted(names, key=lambda name: (len(tensors[name].shape) < 2, -tensors[name].size, name))
    representatives: dict[tuple[str, str], str] = {}
    for name in by_size:
        representatives.setdefault((role_of(name), tensors[name].codec), name)
    worst = sorted((name for name in names if errors.get(name)), key=lambda name: (-errors[name], name))
    return list(dict.fromkeys((*representatives.values(), *worst[: count // 2], *by_size)))[:count]


def histogram(tensor: Tensor, reference: Tensor | None) -> Histogram | None:
    """Return the histogram of a sample of a tensor, and of the same rows of ``reference``.

    Returns None if a tensor cannot be decoded, or if the samples have no finite value.
    """
    try:
        values = _sample(tensor)
        has_reference = reference is not None and reference.shape == tensor.shape
        reference_values = _sample(reference) if reference is not None and has_reference else None
    except UnsupportedError:
        return None
    finite = values if reference_values is None else np.concatenate((values, reference_values))
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return None
    edge = min(float(np.quantile(np.abs(finite), 0.999)) * 1.05, _MAX_EDGE) or 1.0
    levels, run = _levels(tensor)
    return Histogram(
        tensor.name,
        tensor.codec,
        -edge,
        edge,
        len(values),
        _counts(values, edge),
        None if reference_values is None else _counts(reference_values, edge),
        levels,
        run,
    )


def _is_small(tensor: Tensor) -> bool:
    return bool(tensor.size) and (len(tensor.shape) < 2 or tensor.size // tensor.shape[0] <= _MAX_ROW)


def _counts(values: Array, edge: float) -> list[int]:
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(np.clip(finite, -edge, edge), BINS, (-edge, edge))
    return [int(count) for count in counts]


def _sample(tensor: Tensor) -> Array:
    """Return at most ``_VALUES`` values of a tensor in f64, from rows at equal distances."""
    if not tensor.shape:
        return tensor.numpy("f32").reshape(-1).astype(np.float64)
    rows = tensor.shape[0]
    width = max(tensor.size // rows, 1)
    sampled_rows = max(1, min(rows, _VALUES // width))
    slice_count = min(_SLICES, sampled_rows)
    slice_rows = max(1, sampled_rows // slice_count)
    starts = sorted({round(index * (rows - slice_rows) / max(slice_count - 1, 1)) for index in range(slice_count)})
    slices = [np.asarray(tensor[start : start + slice_rows]).astype(np.float64).reshape(-1) for start in starts]
    values = np.concatenate(slices)
    return values[:: -(-len(values) // _VALUES)]


def _levels(tensor: Tensor) -> tuple[list[float], int]:
    """Return the distinct values at the beginning of a tensor's first row, and the number of values examined.

    ``_RUN`` values are examined first, then the full row. Returns ([], 0) if there are too many distinct values for a
    tensor of codes.
    """
    if len(tensor.shape) < 2:
        return [], 0
    row = np.asarray(tensor[0:1]).astype(np.float64).reshape(-1)
    row = row[np.isfinite(row)]
    for run in (_RUN, len(row)):
        levels = np.unique(row[:run])
        if run <= len(row) and 1 < len(levels) <= min(run // 2, _LEVELS):
            return [float(level) for level in levels], run
    return [], 0
