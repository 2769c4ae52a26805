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
from ingot.errors import IngotError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.ggml import TYPES
from ingot.model.statistics import INPUTS, OUTPUTS, SQUARES, ArrayEntry, MatrixStatistics
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.rounding import IMPORTANCE
from ingot.quantization.tensor import round_tensor
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.recipe import Recipe

_REPEATS = 2
_ROWS = 128
_COLUMNS = 256
_BYTES_PER_WEIGHT = 32  # while a matrix is rounded: the f32 weight, its target, its result, errors, products


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected cost of a quantization.

    ``calibration`` and ``rounding`` are seconds; ``memory`` is bytes. ``mode`` is the calibration that it is for.
    """

    mode: str
    calibration: float
    rounding: float
    memory: int

    @property
    def seconds(self) -> float:
        """All seconds together."""
        return self.calibration + self.rounding

    def describe(self) -> str:
        """Return the estimate as one line."""
        parts = f" ({_duration(self.calibration)} of it calibration)" if self.calibration else ""
        return f"about {_duration(self.seconds)}{parts}, {format_size(self.memory)} of memory besides the program"


def _duration(seconds: float) -> str:
    minutes = int(seconds / 60 + 0.5)
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class _UnitStatistics:
    """Statistics of inputs and gradients that are independent, for measuring the time of rounding."""

    def __init__(self, rows: int, columns: int) -> None:
        self._entries = {
            INPUTS: ArrayEntry(np.eye(columns, dtype=np.float32)),
            OUTPUTS: ArrayEntry(np.eye(rows, dtype=np.float32)),
            SQUARES: ArrayEntry(np.ones(columns, np.float32)),
        }

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return the same statistics for every matrix."""
        return MatrixStatistics(name, self._entries, 1)


def estimate_rounding(checkpoint: Checkpoint, recipe: Recipe) -> tuple[float, int]:
    """Return the seconds and the bytes of memory that a recipe takes on a model.

    One small block of a matrix is rounded for each choice of the recipe; its time is scaled to all matrices.
    """
    layer_count = layers_of(checkpoint)
    units: dict[int, float] = {}
    samples: dict[int, tuple[Choice, Tensor]] = {}
    largest = 0
    for name, tensor in checkpoint.items():
        choice = decide(checkpoint, name, recipe, layer_count).choice
        choice = choice.candidates[0] if isinstance(choice, Measured) else choice
        if choice is None or len(tensor.shape) < 2 or not tensor.size:
            continue
        samples.setdefault(id(choice), (choice, tensor))
        units[id(choice)] = units.get(id(choice), 0.0) + _work(choice, *tensor.matrix_shape)
        largest = max(largest, tensor.size)
    seconds = sum(_seconds_per_unit(*sample) * units[key] for key, sample in samples.items())
    return seconds, largest * _BYTES_PER_WEIGHT


def _work(choice: Choice, rows: int, columns: int) -> float:
    """Return units of work for a matrix: products if errors are fed back, else weights."""
    feeds_back = choice.quantizer is not None and not choice.quantizer.endswith(IMPORTANCE)
    return float(rows) * columns * (rows + columns if feeds_back else 1)


def _seconds_per_unit(choice: Choice, tensor: Tensor) -> float:
    """Return the seconds of a unit of work: the shortest of several runs, because the first one also loads code."""
    sample = _sample(choice, tensor)
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        try:
            if choice.quantizer is None:
                stored_rows(tensor, choice, sample)
            else:
                spec = parse_quantizer(choice.quantizer, choice.codec, choice.options)
                round_tensor(spec, iter([(tensor.name, cast(sample, "f32"))]), _UnitStatistics(*sample.shape))
        except IngotError:  # the conversion raises the precise error
            return 0.0
        seconds.append(time.perf_counter() - started)
    return min(seconds) / _work(choice, *sample.shape)


def _sample(choice: Choice, tensor: Tensor) -> Array:
    """Return the first rows and columns of a tensor as a matrix, in whole groups and blocks."""
    rows, columns = tensor.matrix_shape
    group = choice.options.get("group")
    unit = lcm(group if isinstance(group, int) else 1, _block_columns(choice))
    width = min(columns, max(unit, _COLUMNS // unit * unit))
    first = tensor[tuple(0 for _ in tensor.shape[:-2])] if len(tensor.shape) > 2 else tensor
    block: Sequence[slice] = (slice(0, min(rows, _ROWS)), slice(0, width))
    return np.ascontiguousarray(first[tuple(block)])


def _block_columns(choice: Choice) -> int:
    block = TYPES.get(str(choice.options.get("type")))
    return 1 if block is None else block.elements
