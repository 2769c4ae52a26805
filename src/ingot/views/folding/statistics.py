"""Statistics of a folded model, from those of the model: each matrix's moments as the maps at its ends change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ingot.model.statistics import ABSMAX, INPUTS, MEANS, OUTPUTS, SQUARES, ArraySource, MatrixStatistics
from ingot.model.tensor import Array
from ingot.quantization.maps import LinearMap, RepeatableMap, Scale, both_backs, both_sides
from ingot.quantization.tensor import StatisticsSource
from ingot.views.folding.fold import Folding, reading, writing
from ingot.views.folding.graph import Ends


@dataclass(frozen=True, slots=True)
class FoldedStatistics:
    """The statistics of a model that a folding was applied to; arrays are computed when they are asked for."""

    known: StatisticsSource
    folding: Folding

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """As ``Statistics.for_matrix``."""
        of = self.known.for_matrix(name)
        ends = self._ends(name)
        if of is None or ends is None:
            return of
        return folded(of, ends, self.folding)

    def _ends(self, name: str) -> Ends | None:
        stored, _, number = name.partition(":expert.")
        site = self.folding.graph.sites.get(stored)
        return None if site is None or site.kind != "matrix" else site.ends[int(number or 0)]


def folded(of: MatrixStatistics, ends: Ends, folding: Folding) -> MatrixStatistics:
    """Return the statistics of one matrix with maps at its ends.

    ``A`` becomes ``T A T^T``, ``G`` becomes ``S^-T G S^-1``, T and S the maps of inputs and outputs. Mean squares
    follow exactly where T is diagonal; else they are A's diagonal, of tokens weighed as in A, or what they would be if
    inputs did not go together, where A is not known. Means follow exactly: ``T m``. The largest magnitudes follow a
    diagonal T alone.
    """

    def inputs() -> RepeatableMap | None:
        return reading(folding, ends)

    entries: dict[str, ArraySource] = {SQUARES: _Made((of.cols,), lambda: _squares(of, inputs()))}
    if of.has_inputs:
        entries[INPUTS] = _Made((of.cols, of.cols), lambda: _moment(of.inputs, inputs(), both_sides))
    if of.rows is not None:
        shape = (of.rows, of.rows)
        entries[OUTPUTS] = _Made(shape, lambda: _moment(of.outputs, writing(folding, ends), both_backs))
    if of.means is not None:
        entries[MEANS] = _Made((of.cols,), lambda: _turned(of.means, inputs()))
    if of.absmax is not None and isinstance(found := inputs(), Scale | None):
        entries[ABSMAX] = _Made((of.cols,), lambda: _scaled(of.absmax, found))
    return MatrixStatistics(of.name, entries, of.count)


@dataclass(frozen=True, slots=True)
class _Made:
    """An ``ArraySource`` that is computed."""

    shape: tuple[int, ...]
    make: Callable[[], Array]

    def numpy(self) -> Array:
        return self.make()


def _moment(moment: Array | None, change: LinearMap | None, turned: Callable[[Array, LinearMap], Array]) -> Array:
    assert moment is not None
    return moment if change is None else turned(moment, change)


def _squares(of: MatrixStatistics, change: RepeatableMap | None) -> Array:
    if change is None or isinstance(change, Scale):
        return of.diagonal if change is None else of.diagonal * np.square(change.by)
    inputs = of.inputs
    if inputs is not None:
        return np.maximum(both_sides(inputs, change).diagonal(), 0)
    roots = np.diag(np.sqrt(of.diagonal))
    found: Array = np.square(change.forward(roots)).sum(0, dtype=np.float64).astype(np.float32)
    return found


def _turned(means: Array | None, change: RepeatableMap | None) -> Array:
    assert means is not None
    return means if change is None else change.forward(np.ascontiguousarray(means[None]))[0]


def _scaled(largest: Array | None, change: RepeatableMap | None) -> Array:
    assert largest is not None
    return largest if not isinstance(change, Scale) else largest * np.abs(change.by)
