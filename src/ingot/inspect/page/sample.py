"""Histograms of samples of tensors, and the levels that codes stand for there."""

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
_LARGEST = 1 << 22  # elements of one index of the first dimension: more are not decoded for a picture
_RUN = 64
_LEVELS = 256
_WIDEST = float(np.finfo(np.float64).max) / 4  # twice as much is a number too


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values of a sample lie in each of ``BINS`` equal steps from ``low`` to ``high``.

    ``reference`` counts those of the tensor that it was made of, where there is one. ``levels`` are the values that
    codes stand for among the first ``run`` values of a row; none where values are not of so few levels. What lies
    outside counts in the first and the last step.
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


def chosen(tensors: Mapping[str, Tensor], errors: Mapping[str, float], count: int) -> list[str]:
    """Return the names of ``count`` tensors to look at: the largest of each role and codec, then the worst, then the
    largest."""
    names = [name for name, tensor in tensors.items() if tensor.dtype in FLOATS and _is_small(tensor)]
    by_size = sorted(names, key=lambda name: (len(tensors[name].shape) < 2, -tensors[name].size, name))
    kinds: dict[tuple[str, str], str] = {}
    for name in by_size:
        kinds.setdefault((role_of(name), tensors[name].codec), name)
    worst = sorted((name for name in names if errors.get(name)), key=lambda name: (-errors[name], name))
    return list(dict.fromkeys((*kinds.values(), *worst[: count // 2], *by_size)))[:count]


def histogram(tensor: Tensor, reference: Tensor | None) -> Histogram | None:
    """Return the histogram of a tensor's sample, of the same rows of ``reference`` too; None where none is decoded."""
    try:
        values = _sample(tensor)
        beside = None if reference is None or reference.shape != tensor.shape else _sample(reference)
    except UnsupportedError:
        return None
    both = values if beside is None else np.concatenate((values, beside))
    both = both[np.isfinite(both)]
    if not both.size:
        return None
    edge = min(float(np.quantile(np.abs(both), 0.999)) * 1.05, _WIDEST) or 1.0
    levels, run = _levels(tensor)
    return Histogram(
        tensor.name,
        tensor.codec,
        -edge,
        edge,
        len(values),
        _counts(values, edge),
        None if beside is None else _counts(beside, edge),
        levels,
        run,
    )


def _is_small(tensor: Tensor) -> bool:
    return bool(tensor.size) and (len(tensor.shape) < 2 or tensor.size // tensor.shape[0] <= _LARGEST)


def _counts(values: Array, edge: float) -> list[int]:
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(np.clip(finite, -edge, edge), BINS, (-edge, edge))
    return [int(count) for count in counts]


def _sample(tensor: Tensor) -> Array:
    """Return at most ``_VALUES`` values in f64: of rows at equal distances."""
    if not tensor.shape:
        return tensor.numpy("f32").reshape(-1).astype(np.float64)
    rows, width = tensor.shape[0], max(tensor.size // tensor.shape[0], 1)
    wanted = max(1, min(rows, _VALUES // width))
    pieces = min(_SLICES, wanted)
    each = max(1, wanted // pieces)
    starts = sorted({round(index * (rows - each) / max(pieces - 1, 1)) for index in range(pieces)})
    taken = [np.asarray(tensor[start : start + each]).astype(np.float64).reshape(-1) for start in starts]
    values = np.concatenate(taken)
    return values[:: -(-len(values) // _VALUES)]


def _levels(tensor: Tensor) -> tuple[list[float], int]:
    """Return the different values in a group of a row, or in the whole row, where they are few: a grid of codes."""
    if len(tensor.shape) < 2:
        return [], 0
    row = np.asarray(tensor[0:1]).astype(np.float64).reshape(-1)
    row = row[np.isfinite(row)]
    for run in (_RUN, len(row)):
        levels = np.unique(row[:run])
        if run <= len(row) and 1 < len(levels) <= min(run // 2, _LEVELS):
            return [float(level) for level in levels], run
    return [], 0
