"""Estimates of the time and memory that a quantization takes, from short measurements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from ingot.conversion.candidates import stored_rows
from ingot.conversion.plan import decide, layers_of
from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.memory import format_size
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.errors import IngotError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.ggml import TYPES
from ingot.model.statistics import INPUTS, OUTPUTS, SQUARES, ArrayEntry, MatrixStatistics
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.rounding import IMPORTANCE, TWO_SIDED
from ingot.quantization.tensor import round_tensor
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.recipe import Recipe
from ingot.reporting.report import duration_text

_REPEATS = 2
_ROWS = 128
_COLUMNS = 256
_MAX_ROWS = 1024  # of a part: its random second moments are as large as the square of its rows
_POINTS = 2
_ENOUGH = 0.2
"""If a measurement takes at least this number of seconds, no larger part is measured."""

clock = time.perf_counter
"""The clock of all measurements."""
_BYTES_PER_WEIGHT = 32  # while a matrix is rounded: the f32 weight, its target, its result, errors, products


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected cost of a quantization.

    ``mode`` is the calibration that the estimate assumes. ``calibration`` and ``rounding`` are seconds; ``memory`` and
    ``disk`` are the peaks in bytes.
    """

    mode: str
    calibration: float
    rounding: float
    memory: int
    disk: int = 0

    @property
    def seconds(self) -> float:
        """The total seconds."""
        return self.calibration + self.rounding

    def describe(self) -> str:
        """Return the estimate as one line."""
        parts = f" ({duration_text(self.calibration)} of it calibration)" if self.calibration else ""
        disk = f", {format_size(self.disk)} of disk until it is done" if self.disk else ""
        memory = f"{format_size(self.memory)} of memory besides the program"
        return f"about {duration_text(self.seconds)}{parts}, {memory}{disk}"


class _RandomStatistics:
    """Statistics of random inputs and gradients, for measuring the time of rounding by a quantizer."""

    def __init__(self, quantizer: str, rows: int, columns: int) -> None:
        inputs = _random_moment(columns)
        arrays = {SQUARES: inputs.diagonal().copy()}
        if not quantizer.endswith(IMPORTANCE):
            arrays[INPUTS] = inputs
        if quantizer.endswith(TWO_SIDED):
            arrays[OUTPUTS] = _random_moment(rows)
        self._entries = {name: ArrayEntry(values) for name, values in arrays.items()}

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return the same statistics for every matrix."""
        return MatrixStatistics(name, self._entries, 1)


def _random_moment(size: int) -> Array:
    values = np.random.default_rng(0).standard_normal((size, size), np.float32)
    return values.T @ values / np.float32(size)


@dataclass(slots=True)
class _Work:
    """The work of a rule's choice: numbers of weights and products, and the largest tensor, which is measured."""

    choice: Choice
    tensor: Tensor
    weights: float = 0.0
    products: float = 0.0


def estimate_rounding(checkpoint: Checkpoint, recipe: Recipe, workers: int | None = None) -> tuple[float, int]:
    """Return the seconds and the bytes of memory that the rounding of a model by a recipe takes.

    Parts of a matrix are rounded for each choice of the recipe; their times are scaled to all matrices. ``workers``
    parts are rounded at once, as in a conversion; by default, one per processor.
    """
    layer_count = layers_of(checkpoint)
    work: dict[int, _Work] = {}
    largest = 0
    for name, tensor in checkpoint.items():
        choice = decide(checkpoint, name, recipe, layer_count).choice
        choice = choice.candidates[0] if isinstance(choice, Measured) else choice
        if choice is None or len(tensor.shape) < 2 or not tensor.size:
            continue
        item = work.setdefault(id(choice), _Work(choice, tensor))
        item.weights += tensor.size
        item.products += float(tensor.size) * sum(tensor.shape[-2:])
        if tensor.size > item.tensor.size:
            item.tensor = tensor
        largest = max(largest, tensor.size)
    seconds = sum(_seconds_of(item, workers or default_workers()) for item in work.values())
    return seconds, largest * _BYTES_PER_WEIGHT


def _seconds_of(work: _Work, workers: int) -> float:
    """Return the seconds of a rule's work, extrapolated from measurements of at least two parts of a matrix.

    Each part is larger than the part before.
    """
    points: list[tuple[float, float, float]] = []  # weights, products, seconds
    scale = 1
    while len(points) < _POINTS or points[-1][2] < _ENOUGH:
        sample = _sample(work.choice, work.tensor, scale * _ROWS, scale * _COLUMNS)
        point = float(sample.size), float(sample.size) * sum(sample.shape)
        if points and (points[-1][0] == point[0] or scale * _ROWS > _MAX_ROWS):
            break
        seconds = _rounding_seconds(work.choice, work.tensor.name, work.tensor, sample, workers)
        if seconds is None:
            return 0.0
        points.append((*point, seconds))
        scale *= 2
    per_weight, per_product = _fit(points, feeds_back=_feeds_back(work.choice))
    return per_weight * work.weights + per_product * work.products


def _feeds_back(choice: Choice) -> bool:
    """Return whether the quantizer feeds errors back, which needs products with second moments."""
    return choice.quantizer is not None and not choice.quantizer.endswith(IMPORTANCE)


def _fit(points: Sequence[tuple[float, float, float]], *, feeds_back: bool) -> tuple[float, float]:
    """Return the seconds per weight and per product, fitted to the last two measurements; neither is negative."""
    weights, products, seconds = points[-1]
    if not feeds_back or len(points) == 1:
        return seconds / weights, 0.0
    fewer_weights, fewer_products, fewer_seconds = points[-2]
    determinant = weights * fewer_products - products * fewer_weights
    per_weight = (seconds * fewer_products - products * fewer_seconds) / determinant
    per_product = (weights * fewer_seconds - seconds * fewer_weights) / determinant
    if per_weight < 0:
        return 0.0, seconds / products
    return (seconds / weights, 0.0) if per_product < 0 else (per_weight, per_product)


def _rounding_seconds(choice: Choice, name: str, tensor: Tensor, sample: Array, workers: int) -> float | None:
    """Return the seconds of rounding a sample while ``workers`` threads round samples; None if it cannot be rounded."""
    statistics = None if choice.quantizer is None else _RandomStatistics(choice.quantizer, *sample.shape)

    def run(_: int) -> None:
        if choice.quantizer is None or statistics is None:
            stored_rows(tensor, choice, sample)
        else:
            spec = parse_quantizer(choice.quantizer, choice.codec, choice.options)
            round_tensor(spec, iter([(name, cast(sample, "f32"))]), statistics)

    seconds = 0.0
    for _ in range(_REPEATS):
        started = clock()
        try:
            for _result in ordered(run, range(workers), workers):
                pass
        except IngotError:  # the conversion raises the precise error
            return None
        seconds = (clock() - started) / workers
        if seconds > _ENOUGH:
            break  # the first run also loads code, which is a small part of a long run
    return seconds


def _sample(choice: Choice, tensor: Tensor, max_rows: int, max_columns: int) -> Array:
    """Return the first rows and columns of a tensor as a matrix, in whole groups and blocks."""
    rows, columns = tensor.shape[-2:]
    group = choice.options.get("group")
    unit = lcm(group if isinstance(group, int) else 1, _block_columns(choice))
    width = min(columns, max(unit, max_columns // unit * unit))
    first = tensor[tuple(0 for _ in tensor.shape[:-2])] if len(tensor.shape) > 2 else tensor
    block: Sequence[slice] = (slice(0, min(rows, max_rows)), slice(0, width))
    return np.ascontiguousarray(first[tuple(block)])


def _block_columns(choice: Choice) -> int:
    block = TYPES.get(str(choice.options.get("type")))
    return 1 if block is None else block.elements
