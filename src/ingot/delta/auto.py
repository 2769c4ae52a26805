"""Strategy ``auto``: choose how to store each tensor's difference by measurements, for a given size or error.

Every candidate is tried on a sample of the difference, one tensor per thread. If the sample suggests a low rank, two
passes over the full difference measure it. For a given error, each tensor gets the smallest candidate within it. For a
given size, bytes go to the tensors whose error they reduce most: the lower convex hulls of all tensors' sizes and
errors are followed by steepest slope (Everett, "Generalized Lagrange multiplier method", Operations Research 11, 1963).
In this comparison, squared errors are divided by the mean square of the base's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.delta.base import as_f32, delta_codec, difference
from ingot.codecs.resolve_range import resolve_range
from ingot.codecs.table import CODECS, LOW_RANK, WITH_OUTLIERS
from ingot.codecs.wrap.low_rank_fit import OVERSAMPLING, spectrum
from ingot.conversion.candidates import sample_of
from ingot.core.bytes import encodings
from ingot.core.numeric.dtypes import dtype as element_type
from ingot.core.runtime.memory import parse_size
from ingot.core.runtime.parallel import ordered
from ingot.core.runtime.progress import Progress
from ingot.delta.pairs import TensorPair
from ingot.delta.strategy import EXACT, Storage, is_matrix
from ingot.engine.chunks import chunks
from ingot.engine.fit import cast_exactly, fit_rows
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.tensor import Array, Tensor

Pair = tuple[Tensor, Tensor]

OVERHEAD = 640
"""Bytes per tensor in a container in addition to its parts: names, attributes, digests, padding."""


def _grid(bits: int, group: int | str, **extra: Any) -> Storage:
    return Storage(AffineLayout.codec, {"bits": bits, "group": group, **extra})


_FIT = {"quantizer": "mse", "unbiased": True}
CANDIDATES: tuple[Storage, ...] = (
    Storage(LOW_RANK, {"rank": 0}),
    Storage(AffineLayout.codec, {"bits": 1, "group": "row", "scales": "auto", "quantizer": "sign-rms"}, "zstd"),
    _grid(2, 128, symmetric=False, **_FIT),
    _grid(2, 32, symmetric=False, **_FIT),
    _grid(3, 128, **_FIT),
    _grid(3, 32, **_FIT),
    _grid(4, 128, **_FIT),
    _grid(4, 32),
    Storage(WITH_OUTLIERS, {"fraction": 0.01, "options": {"bits": 4, "group": 64}}),
    _grid(5, 64),
    _grid(6, 64),
    _grid(8, 128),
    EXACT,
)
SHORTFALL = 8.0
"""The factor by which the missing part of a difference counts more than noise of the same squared norm. Noise averages
out in products with activations (``spec/deltas-quality.md``)."""
LOW_RANK_ERROR = 0.1
"""The share of the squared norm that a product of thin matrices may lack. A missing part costs more perplexity than the
same amount of quantization noise (``spec/deltas-quality.md``)."""
SAMPLE = 1 << 18
"""The number of elements of a sample. Mean squares of a sample are within one percent of those of the full tensor."""
PER_PAIR = 96 << 20
"""The largest number of bytes that measuring a tensor needs: several f64 copies of the sample, and a spectrum."""
_SPECTRUM = 16 << 20  # bytes of one of a spectrum's three matrices
_CHUNK = 1 << 20
RANKS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate for storing a tensor's difference, with its estimated bytes and its squared error.

    ``size`` is the number of bytes. ``error`` is the squared error divided by the squared norm of the true difference,
    so 1 is the error of storing nothing. It is the sum of a missing part and of noise. The missing part is
    ``(1 - a)**2``, where ``a`` times the true difference is the projection of the stored difference onto the true
    difference. In ``weighted_error``, the missing part counts ``SHORTFALL`` times.
    """

    storage: Storage
    size: float
    error: float
    weighted_error: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The candidates tried for a tensor, and the weight of its error in the sum over all tensors."""

    name: str
    weight: float
    trials: Sequence[Trial]


def choose(
    pairs: Sequence[Pair],
    *,
    target_size: int | None = None,
    max_error: float | None = None,
    workers: int = 0,
    progress: Progress | None = None,
    measuring: Callable[[Tensor, Tensor], Measured] | None = None,
) -> dict[str, Storage]:
    """Return the storage of the difference of each pair, by tensor name.

    Parameters
    ----------
    pairs : sequence of (base, fine-tune)
        Tensors of one shape.
    target_size : int, optional
        The largest number of bytes of all stored differences together, including ``OVERHEAD`` per tensor.
    max_error : float, optional
        The largest permitted norm of a tensor's error, divided by the norm of its difference; 0 for exact storages.
    workers : int
        Threads that measure, each with at most ``PER_PAIR`` bytes; 0 for the caller's thread.
    progress : Progress, optional
        Receives the stored bytes of each pair after it is measured.
    measuring : callable
        Measures a pair; by default ``measure``.

    Raises
    ------
    UsageError
        ``delta.target``: neither or both limits given, out of range, or impossible with these candidates.
    """
    require_one(target_size, max_error)
    measured = []
    of_pair = measuring or measure
    for (base, tuned), measurement in zip(pairs, ordered(lambda pair: of_pair(*pair), pairs, workers), strict=True):
        measured.append(measurement)
        if progress is not None:
            progress.advance(base.nbytes + tuned.nbytes, tuned.name)
    return choose_storages(measured, target_size, max_error)


def require_one(target_size: float | str | None, max_error: float | None) -> None:
    """Raise ``UsageError`` ``delta.target`` unless exactly one of ``target_size`` and ``max_error`` is set."""
    if (target_size is None) == (max_error is None):
        raise UsageError("expected a target size or a largest error for strategy auto", rule="delta.target")
    if max_error is not None and not 0 <= max_error < inf:
        raise UsageError(f"expected a largest error of at least 0, found {max_error}", rule="delta.target")


def choose_storages(
    measured: Sequence[Measured], target_size: int | None, max_error: float | None
) -> dict[str, Storage]:
    """Return the storage of each measured tensor, by name, within a size or an error; see ``choose``.

    Raises ``UsageError`` ``delta.target`` if the size is too small.
    """
    if max_error is not None:
        return {item.name: _within(item, max_error).storage for item in measured}
    assert target_size is not None
    return _allocate(measured, target_size - OVERHEAD * len(measured))


def measure_pair(pair: TensorPair) -> Measured:
    """Return the result of ``measure`` for the leading rows that exist in both tensors of a pair."""
    return measure(*pair.shared())


def measure(base: Tensor, tuned: Tensor) -> Measured:
    """Return a trial of each candidate that can store the difference of the two tensors.

    The only trial of a tensor that is no matrix is ``delta_exact``.
    """
    exact = Trial(EXACT, float(tuned.nbytes), 0.0, 0.0)
    if not is_matrix(tuned.shape, tuned.dtype):
        return Measured(tuned.name, 1.0, (exact,))
    old = sample_of(base, SAMPLE)
    new = sample_of(tuned, SAMPLE)
    if old.shape != new.shape:  # one file was sampled by runs, the other by rows
        return Measured(tuned.name, 1.0, (exact,))
    delta = difference(old, new)
    energy = float(np.square(delta.astype(np.float64)).sum())
    if not np.isfinite(energy):
        return Measured(tuned.name, 1.0, (exact,))
    trials = [_exact(old, new, tuned)]
    trials += [
        trial
        for storage in CANDIDATES
        if storage != EXACT
        if (trial := _trial(storage, delta, energy, tuned)) is not None
    ]
    scale = float(np.square(as_f32(old).astype(np.float64)).mean())
    weight = energy * tuned.size / max(delta.size, 1) / (scale or 1.0)
    return Measured(tuned.name, weight, (*trials, *_low_ranks(base, tuned, delta, trials)))


def estimate(base: Tensor, tuned: Tensor, storage: Storage) -> float:
    """Return the estimated number of bytes of the difference of two tensors in ``storage``.

    If the number depends on values, it is estimated from a sample. It is ``inf`` if the codec refuses the values.
    """
    old = sample_of(base, SAMPLE)
    new = sample_of(tuned, SAMPLE)
    if old.shape != new.shape:  # see ``measure``
        return float(tuned.nbytes)
    if storage == EXACT:
        return _exact(old, new, tuned).size
    delta = difference(old, new)
    trial = _trial(storage, delta, float(np.square(delta.astype(np.float64)).sum()), tuned)
    return inf if trial is None else trial.size


def exact_bytes(old: Array, new: Array, dtype: str) -> int:
    """Return the number of bytes of the exact difference of two arrays of one element type."""
    encoder = delta_codec(EXACT.codec).encoder(old.shape, dtype, EXACT.options)
    return sum(part.nbytes for part in encoder.encode(old, new).values())


def _exact(old: Array, new: Array, tuned: Tensor) -> Trial:
    stored = exact_bytes(fit_rows(old, len(old), tuned.dtype), new, tuned.dtype)
    coarse = cast_exactly(new, element_type(old.dtype).name) if old.dtype != new.dtype else None
    if coarse is not None:
        stored = min(stored, exact_bytes(old, coarse, element_type(old.dtype).name))
    return Trial(EXACT, stored * tuned.size / max(old.size, 1), 0.0, 0.0)


def _trial(storage: Storage, delta: Array, energy: float, tuned: Tensor) -> Trial | None:
    def make_encoder(options: Mapping[str, Any]) -> Encoder:
        return CODECS[storage.codec].encoder(delta.shape, "f32", options)

    try:
        encoder = make_encoder(storage.options)
        encoder, _ = resolve_range(encoder, make_encoder, storage.options, [(0, delta)])
        for _ in range(encoder.fit_passes):
            encoder.fit_pass(delta)
        parts = encoder.encode(delta)
    except (CodecError, UnsupportedError):
        return None
    decoded = np.empty(delta.shape, np.float32)
    encoder.decode(parts, decoded)
    wide = delta.astype(np.float64)
    error = 0.0
    along = 1.0
    if energy:
        error = float(np.square(decoded - wide).sum()) / energy
        along = float((decoded * wide).sum()) / energy
    return Trial(storage, _size(storage, encoder, parts, tuned, delta.size), error, _weighted_error(error, along))


def _weighted_error(error: float, along: float) -> float:
    missing = (1 - along) ** 2
    return error + (SHORTFALL - 1) * missing


def _size(storage: Storage, encoder: Encoder, parts: Mapping[str, Array], tuned: Tensor, sampled: int) -> float:
    """Return the bytes of the difference of the full tensor ``tuned`` in ``storage``.

    If the number depends on values, it is extrapolated from ``parts``, the encoded parts of a sample of ``sampled``
    elements.
    """
    if storage.encoding == "raw":
        full_encoder = CODECS[storage.codec].encoder(tuned.shape, "f32", storage.options)
        lengths = [part.length for part in full_encoder.parts]
        if None not in lengths:
            return float(sum(length or 0 for length in lengths))
    scale = tuned.size / max(sampled, 1)
    return scale * sum(part.nbytes if storage.encoding == "raw" else _packed(part) for part in parts.values())


def _packed(part: Array) -> int:
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return sum(
        len(encodings.compress_frame(data[start : start + encodings.FRAME].data))
        for start in range(0, data.size, encodings.FRAME)
    )


def _low_ranks(base: Tensor, tuned: Tensor, sample: Array, trials: Sequence[Trial]) -> Iterable[Trial]:
    """Yield a low-rank trial for each rank whose error over the full difference is at most ``LOW_RANK_ERROR``.

    Yield nothing if no rank is promising on ``sample``. A rank is promising if its error is less than
    ``LOW_RANK_ERROR``, and less than the error of every trial that is not larger. The sampled error is a lower bound,
    because a low rank approximates the sampled rows at least as well as the full matrix.
    """
    rows, cols = tuned.matrix_shape
    max_rank = min(RANKS[-1], min(rows, cols) // 2, _SPECTRUM // (8 * cols) - OVERSAMPLING)
    if max_rank < 1 or not _is_promising(spectrum(lambda: [sample], sample.shape[1], max_rank), (rows, cols), trials):
        return
    residual = spectrum(lambda: _differences(base, tuned), cols, max_rank)
    for rank in RANKS:
        if rank <= max_rank and residual[rank] <= LOW_RANK_ERROR:
            error = float(residual[rank])
            yield Trial(
                Storage(LOW_RANK, {"rank": rank}), 2.0 * rank * (rows + cols), error, _weighted_error(error, 1 - error)
            )


def _differences(base: Tensor, tuned: Tensor) -> Iterator[Array]:
    """Yield ``tuned - base`` in chunks of rows, float32."""
    matrix = tuned.matrix_shape
    step = max(1, _CHUNK // max(matrix[1], 1))
    for old, new in zip(chunks(base, matrix, step), chunks(tuned, matrix, step), strict=True):
        yield difference(old, new)


def _is_promising(residual: Array, shape: tuple[int, int], trials: Sequence[Trial]) -> bool:
    for rank in RANKS:
        if rank >= len(residual):
            return False
        size = 2.0 * rank * sum(shape)
        best = min((trial.error for trial in trials if trial.size <= size), default=1.0)
        if residual[rank] < min(best, LOW_RANK_ERROR):
            return True
    return False


def _within(item: Measured, max_error: float) -> Trial:
    fitting = [trial for trial in item.trials if trial.error <= max_error**2]
    return min(fitting, key=lambda trial: (trial.size, trial.error))


def _hull(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials on the lower convex hull of weighted error over size, ordered by size."""
    hull: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.size, trial.weighted_error)):
        if hull and trial.weighted_error >= hull[-1].weighted_error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], trial):
            hull.pop()
        if hull and trial.size == hull[-1].size:
            hull.pop()
        hull.append(trial)
    return hull


def _slope(first: Trial, second: Trial) -> float:
    return (first.weighted_error - second.weighted_error) / max(second.size - first.size, 1e-9)


def _allocate(measured: Sequence[Measured], budget: float) -> dict[str, Storage]:
    hulls = [_hull(item.trials) for item in measured]
    remaining = budget - sum(hull[0].size for hull in hulls)
    if remaining < 0:
        minimum = int(budget - remaining) + OVERHEAD * len(measured)
        raise UsageError(f"expected a target size of at least about {minimum} bytes", rule="delta.target")
    steps = sorted(
        (-item.weight * _slope(*hull[step : step + 2]), index, step)
        for index, (item, hull) in enumerate(zip(measured, hulls, strict=True))
        for step in range(len(hull) - 1)
    )
    steps_taken = [0] * len(hulls)
    for _, index, step in steps:
        cost = hulls[index][step + 1].size - hulls[index][step].size
        if steps_taken[index] == step and cost <= remaining:
            steps_taken[index] = step + 1
            remaining -= cost
    return {item.name: hull[step].storage for item, hull, step in zip(measured, hulls, steps_taken, strict=True)}


def target_bytes(size: float | str, full_size: int) -> int:
    """Return a target size in bytes.

    ``size`` is text such as ``200MiB`` (``core.runtime.memory.parse_size``), a number of bytes, or a share of
    ``full_size`` up to 1.

    Raises ``UsageError`` ``delta.target`` or ``size.syntax``.
    """
    try:
        value = float(size)
    except ValueError:
        return parse_size(str(size))
    if not 0 < value < inf:
        raise UsageError(f"expected a target size above 0, found {size}", rule="delta.target")
    return int(value * full_size) if value <= 1 else int(value)
