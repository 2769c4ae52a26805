"""Statistics of a folded model, computed from the original statistics and the maps of each matrix's streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ingot.model.statistics import ABSMAX, INPUTS, MEANS, OUTPUTS, SQUARES, ArraySource, MatrixStatistics
from ingot.model.tensor import Array
from ingot.quantization.maps import LinearMap, RepeatableMap, Scale, both_backs, both_sides
from ingot.quantization.tensor import StatisticsSource
from ingot.views.folding.fold import Folding, input_map, output_map
from ingot.views.folding.graph import Ends


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """The statistics of the matrices of a folded model; arrays are computed on access."""

    original: StatisticsSource
    folding: Folding

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return the statistics of a matrix of the folded model, or None if there are none.

        An embedding has none, because ``fold_statistics`` does not apply to it. A tensor that is no site keeps its
        statistics.
        """
        statistics = self.original.for_matrix(name)
        stored, _, expert = name.partition(":expert.")
        site = self.folding.graph.sites.get(stored)
        if statistics is None or site is None:
            return statistics
        if site.role != "matrix":
            return None
        return fold_statistics(statistics, site.ends[int(expert or 0)], self.folding)


def fold_statistics(statistics: MatrixStatistics, ends: Ends, folding: Folding) -> MatrixStatistics:
    """Return the statistics of a matrix after maps are folded into its inputs and outputs.

    T is the map of the inputs, and S the map of the outputs. The moments A of the inputs become ``T A T^T``, the
    moments G of the gradients ``S^-T G S^-1``, and the means m of the inputs ``T m``.

    If T is diagonal, mean squares and largest magnitudes of inputs are exact. Otherwise mean squares are the diagonal
    of the new A, and largest magnitudes are missing. Without A, inputs are assumed to be uncorrelated.
    """

    def inputs() -> RepeatableMap | None:
        return input_map(folding, ends)

    cols = statistics.cols
    entries: dict[str, ArraySource] = {SQUARES: _ComputedEntry((cols,), lambda: _squares(statistics, inputs()))}
    if statistics.has_inputs:
        entries[INPUTS] = _ComputedEntry((cols, cols), lambda: _moment(statistics.inputs, inputs(), both_sides))
    if statistics.rows is not None:
        shape = (statistics.rows, statistics.rows)
        entries[OUTPUTS] = _ComputedEntry(
            shape, lambda: _moment(statistics.outputs, output_map(folding, ends), both_backs)
        )
    if statistics.means is not None:
        entries[MEANS] = _ComputedEntry((cols,), lambda: _mapped_means(statistics.means, inputs()))
    if statistics.absmax is not None and isinstance(change := inputs(), Scale | None):
        entries[ABSMAX] = _ComputedEntry((cols,), lambda: _scaled(statistics.absmax, change))
    return MatrixStatistics(statistics.name, entries, statistics.count)


@dataclass(frozen=True, slots=True)
class _ComputedEntry:
    """An ``ArraySource`` that a function computes."""

    shape: tuple[int, ...]
    compute: Callable[[], Array]

    def numpy(self) -> Array:
        return self.compute()


def _moment(moment: Array | None, change: LinearMap | None, apply: Callable[[Array, LinearMap], Array]) -> Array:
    assert moment is not None
    return moment if change is None else apply(moment, change)


def _squares(statistics: MatrixStatistics, change: RepeatableMap | None) -> Array:
    if change is None or isinstance(change, Scale):
        return statistics.diagonal if change is None else statistics.diagonal * np.square(change.by)
    inputs = statistics.inputs
    if inputs is not None:
        return np.maximum(both_sides(inputs, change).diagonal(), 0)
    roots = np.diag(np.sqrt(statistics.diagonal))
    squares: Array = np.square(change.forward(roots)).sum(0, dtype=np.float64).astype(np.float32)
    return squares


def _mapped_means(means: Array | None, change: RepeatableMap | None) -> Array:
    assert means is not None
    return means if change is None else change.forward(np.ascontiguousarray(means[None]))[0]


def _scaled(largest: Array | None, change: RepeatableMap | None) -> Array:
    assert largest is not None
    return largest if not isinstance(change, Scale) else largest * np.abs(change.by)
