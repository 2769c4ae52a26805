"""Scales of channels (``quantization.awq``) folded into what comes before: norms, and rows of other matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.quantization.awq import MAX_ROWS, Reader, candidates, losses
from ingot.quantization.grid import Grid
from ingot.quantization.maps import RepeatableMap, Scale
from ingot.quantization.tensor import StatisticsSource
from ingot.views.folding.families import RESIDUAL
from ingot.views.folding.fold import Told, changed_names, fold
from ingot.views.folding.graph import Graph, Site


@dataclass(slots=True)
class Searched:
    """What the search did: by stream the exponent's number, and the error against that without scales."""

    gains: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ScaleFolding:
    """Scales of streams, searched when one is first asked for, by the matrices that multiply it and have a grid.

    Parameters
    ----------
    checkpoint : Checkpoint
        As it is before.
    graph : Graph
    grids : mapping of name to Grid
        What the matrices are rounded to that scales are for.
    known : callable
        Returns statistics.
    dtypes : mapping
        What norms are rounded to, by name: scales are those that the rounded weight makes, so that nothing is lost.
    """

    checkpoint: Checkpoint
    graph: Graph
    grids: Mapping[str, Grid]
    known: Callable[[], StatisticsSource]
    dtypes: Mapping[str, str]
    searched: Searched = field(default_factory=Searched)
    found: dict[str, _Once] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def touches(self, stream: str) -> bool:
        return scales(self.graph, self.grids, stream)

    def map_of(self, stream: str) -> RepeatableMap | None:
        return self._once(stream).scale

    def norm(self, stream: str) -> Array:
        found = self._once(stream)
        return self._norm(stream) if found.weight is None else found.weight

    def _once(self, stream: str) -> _Once:
        with self.lock:
            once = self.found.setdefault(stream, _Once())
        with once.lock:
            if not once.done:
                by = self._search(stream)
                if by is not None:
                    once.scale, once.weight = self._settled(stream, by)
                once.done = True
        return once

    def _search(self, stream: str) -> Array | None:
        """Return the scales of least error; None where nothing is known, or none are better than none."""
        readers = [(site, number) for site, number in self.graph.readers[stream] if site.name in self.grids]
        size = self.graph.sizes[stream]
        squares = []
        for site, number in readers:
            of = self.known().for_matrix(_known_as(site, number))
            if of is not None and of.count:
                times = site.ends[number].times
                block = self.graph.head_size if times > 1 else size
                squares.append(of.diagonal.reshape(-1, times, block).mean(1).reshape(-1))
        if not squares:
            self.searched.unknown.add(stream)
            return None
        tried = candidates(np.mean(squares, 0))
        total = np.zeros(len(tried))
        most = max(16, min(MAX_ROWS, 16 * MAX_ROWS // len(readers)))
        for site, number in readers:
            check_cancelled()
            reader = self._reader(site, number, most)
            if reader is not None:
                total += losses(reader, tried)
        best = int(total.argmin())
        self.searched.gains[stream] = float(total[best] / total[0]) if total[0] > 0 else 1.0
        return tried[best] if best else None

    def _reader(self, site: Site, number: int, most: int) -> Reader | None:
        of = self.known().for_matrix(_known_as(site, number))
        ends = site.ends[number]
        if of is None or not of.count:
            return None
        tensor = self.checkpoint[site.name]
        weights = (tensor.numpy("f32") if len(site.ends) == 1 else tensor[number]).reshape(tensor.shape[-2:])
        of.require_shape(*weights.shape)
        step = -(-len(weights) // most)
        rows = np.ascontiguousarray(cast(weights, "f32")[::step])
        if not np.isfinite(rows).all():
            raise CodecError("fold.value", "expected finite weights, found NaN or infinity", where=site.name)
        outputs = of.outputs
        heavy = np.ones(len(rows)) if outputs is None else outputs.diagonal()[::step].astype(np.float64)
        inputs = of.inputs
        squares = of.diagonal if inputs is None else inputs.diagonal()
        return Reader(rows, self.grids[site.name], inputs, squares, heavy * step, self.graph.head_size, ends.times)

    def _norm(self, stream: str) -> Array:
        weight = self.checkpoint[self.graph.norms[stream]].numpy("f32")
        return weight + np.float32(1) if self.graph.wiring.shifted else weight

    def _settled(self, stream: str, by: Array) -> tuple[Scale, Array | None]:
        """Return the map of a stream whose channels are divided by scales, and the norm's weight where there is one."""
        if stream not in self.graph.norms:
            return Scale(1 / by, by), None
        one = np.float32(1 if self.graph.wiring.shifted else 0)
        weight = self._norm(stream)
        dtype = self.dtypes.get(self.graph.norms[stream], "f32")
        stored = cast(cast(weight / by - one, dtype), "f32") + one
        same = (weight == 0) | (stored == 0) | ~np.isfinite(stored)
        stored = np.where(same, weight, stored)
        weight = np.where(same, 1, weight)
        base = np.where(same, 1, stored)
        return Scale(base / weight, weight / base), stored


class _Once:
    """One stream's scales: searched once, whoever asks first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False
        self.scale: Scale | None = None
        self.weight: Array | None = None


def scaled(folding: ScaleFolding, said: object) -> Checkpoint:
    """Return the checkpoint of a folding with scales folded in; such a view cannot be sent to another process."""
    names = changed_names(folding.graph, folding.touches)
    text = {name: [repr(folding.grids.get(name)), folding.dtypes.get(name, "f32")] for name in names}
    return fold(folding.checkpoint, folding, Told(_scale, folding, [said, text]), folding.dtypes)


def scales(graph: Graph, grids: Mapping[str, Grid], stream: str) -> bool:
    """Whether scales are searched for a stream: for one that a matrix with a grid multiplies."""
    return stream != RESIDUAL and any(site.name in grids for site, _ in graph.readers.get(stream, ()))


def _scale(checkpoint: Checkpoint, folding: ScaleFolding) -> Checkpoint:
    return scaled(replace(folding, checkpoint=checkpoint, found={}), "again")


def _known_as(site: Site, number: int) -> str:
    return site.name if len(site.ends) == 1 else f"{site.name}:expert.{number}"
