"""The steps of models whose matrices are rounded to integers for an entropy coder, and the matrices of a tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.parallel import check_cancelled
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import QuantizerSpec
from ingot.quantization.coded import CodeLengths, code_lengths, equal_steps, find_step
from ingot.quantization.factors import feedback_factor
from ingot.quantization.tensor import StatisticsSource, load_factors, matrices, require_finite


def read_matrices(tensor: Tensor) -> Iterator[tuple[str, Array]]:
    """Yield the name of the statistics and the f32 values of each matrix of a tensor."""
    for name, index in matrices(tensor.name, tensor.shape):
        values = cast(tensor[index] if index else tensor.numpy(), "f32")
        require_finite(values, tensor.name)
        yield name, np.ascontiguousarray(values)


class CodedSteps:
    """The quantization step of a model for each number of coded bits; matrices with the same number share a step.

    A step is computed once, from the matrices that share it and their statistics, when the first of them is rounded.
    """

    def __init__(self, checkpoint: Checkpoint, choices: Mapping[str, QuantizerSpec]) -> None:
        self._checkpoint = checkpoint
        self._names: dict[float, list[str]] = {}
        for name, spec in choices.items():
            if spec.grid.coded is not None:
                self._names.setdefault(spec.grid.coded, []).append(name)
        self._lock = threading.Lock()
        self._steps: dict[float, float | None] = {}

    def of_bits(self, bits: float, statistics: StatisticsSource) -> float | None:
        """Return the step at which the codes of all matrices with ``bits`` coded bits have ``bits`` bits on average.

        Returns None if errors are not comparable in any of the matrices (``RowSteps.comparable``).
        """
        with self._lock:
            if bits not in self._steps:
                lengths = [item for name in self._names[bits] for item in self._lengths(name, statistics)]
                self._steps[bits] = find_step(lengths, bits) if lengths else None
            return self._steps[bits]

    def _lengths(self, name: str, statistics: StatisticsSource) -> Iterator[CodeLengths]:
        for matrix, weights in read_matrices(self._checkpoint[name]):
            check_cancelled()
            factors, _ = load_factors(statistics, matrix, *weights.shape)
            if factors.outputs is None:
                continue
            steps = equal_steps(factors, feedback_factor(factors.new_inputs))
            if steps.comparable:
                yield code_lengths(weights, steps)
