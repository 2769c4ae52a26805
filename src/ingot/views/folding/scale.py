"""Scales of channels (``quantization.awq``), folded into preceding norms or into rows of preceding matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.quantization.awq import MAX_ROWS, Reader, candidates, losses
from ingot.quantization.device.awq import losses_on_device
from ingot.quantization.device.round import rounds_on_device
from ingot.quantization.grid import Grid
from ingot.quantization.maps import RepeatableMap, Scale
from ingot.quantization.tensor import StatisticsSource
from ingot.views.folding.families import RESIDUAL
from ingot.views.folding.fold import ViewKey, changed_names, fold
from ingot.views.folding.graph import Graph, Site


@dataclass(slots=True)
class ScaleSearch:
    """The results of the search for scales.

    ``gains`` is, for each stream, the error with the best scales divided by the error without scales. ``unknown`` are
    the streams without statistics.
    """

    gains: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ScaleFolding:
    """Scales of the channels of streams. The scales of a stream are searched when they are first used.

    Parameters
    ----------
    checkpoint : Checkpoint
        The original checkpoint.
    graph : Graph
    grids : mapping of name to Grid
        The grids to which matrices are rounded. The search minimizes the errors of these matrices only.
    load_statistics : callable
        Returns the statistics.
    dtypes : mapping
        Element types in which norms are stored, by name; f32 for other norms. Scales are computed from the rounded
        weight of the norm, so that the matrices compensate for its rounding.
    device : torch.device, optional
        The device that computes the errors; None for the CPU.
    """

    checkpoint: Checkpoint
    graph: Graph
    grids: Mapping[str, Grid]
    load_statistics: Callable[[], StatisticsSource]
    dtypes: Mapping[str, str]
    device: Any = None
    search: ScaleSearch = field(default_factory=ScaleSearch)
    results: dict[str, _StreamScales] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def touches(self, stream: str) -> bool:
        return has_scales(self.graph, self.grids, stream)

    def map_of(self, stream: str) -> RepeatableMap | None:
        return self._scales_of(stream).scale

    def norm_weight(self, stream: str) -> Array:
        result = self._scales_of(stream)
        return self._original_weight(stream) if result.weight is None else result.weight

    def _scales_of(self, stream: str) -> _StreamScales:
        with self.lock:
            result = self.results.setdefault(stream, _StreamScales())
        with result.lock:
            if not result.is_searched:
                by = self._search(stream)
                if by is not None:
                    result.scale, result.weight = self._map_and_weight(stream, by)
                result.is_searched = True
        return result

    def _search(self, stream: str) -> Array | None:
        """Return the scales of a stream with the least error, or None to leave the stream unscaled.

        It is left unscaled if no matrix that reads it has statistics, or if no scales reduce the error.
        """
        readers = [(site, index) for site, index in self.graph.readers[stream] if site.name in self.grids]
        size = self.graph.sizes[stream]
        squares = []
        for site, index in readers:
            statistics = self.load_statistics().for_matrix(_statistics_name(site, index))
            if statistics is not None and statistics.count:
                repeats = site.ends[index].repeats
                block = self.graph.head_size if repeats > 1 else size
                squares.append(statistics.diagonal.reshape(-1, repeats, block).mean(1).reshape(-1))
        if not squares:
            self.search.unknown.add(stream)
            return None
        tried = candidates(np.mean(squares, 0))
        total = np.zeros(len(tried))
        max_rows = max(16, min(MAX_ROWS, 16 * MAX_ROWS // len(readers)))
        for site, index in readers:
            check_cancelled()
            reader = self._reader(site, index, max_rows)
            if reader is not None:
                on_device = self.device is not None and rounds_on_device(reader.grid)
                total += losses_on_device(reader, tried, self.device) if on_device else losses(reader, tried)
        best = int(total.argmin())
        self.search.gains[stream] = float(total[best] / total[0]) if total[0] > 0 else 1.0
        return tried[best] if best else None

    def _reader(self, site: Site, index: int, max_rows: int) -> Reader | None:
        statistics = self.load_statistics().for_matrix(_statistics_name(site, index))
        ends = site.ends[index]
        if statistics is None or not statistics.count:
            return None
        tensor = self.checkpoint[site.name]
        weights = (tensor.numpy("f32") if len(site.ends) == 1 else tensor[index]).reshape(tensor.shape[-2:])
        statistics.require_shape(*weights.shape)
        step = -(-len(weights) // max_rows)
        rows = np.ascontiguousarray(cast(weights, "f32")[::step])
        if not np.isfinite(rows).all():
            raise CodecError("fold.value", "expected finite weights, found NaN or infinity", where=site.name)
        outputs = statistics.outputs
        row_weights = np.ones(len(rows)) if outputs is None else outputs.diagonal()[::step].astype(np.float64)
        inputs = statistics.inputs
        squares = statistics.diagonal if inputs is None else inputs.diagonal()
        grid = self.grids[site.name]
        return Reader(rows, grid, inputs, squares, row_weights * step, self.graph.head_size, ends.repeats)

    def _original_weight(self, stream: str) -> Array:
        weight = self.checkpoint[self.graph.norms[stream]].numpy("f32")
        return weight + np.float32(1) if self.graph.wiring.shifted else weight

    def _map_and_weight(self, stream: str, by: Array) -> tuple[Scale, Array | None]:
        """Return the map that divides a stream's channels by the scales ``by``, and the new factor of its norm.

        The factor is None if the stream is not the output of a norm.
        """
        if stream not in self.graph.norms:
            return Scale(1 / by, by), None
        shift = np.float32(1 if self.graph.wiring.shifted else 0)
        weight = self._original_weight(stream)
        dtype = self.dtypes.get(self.graph.norms[stream], "f32")
        stored = cast(cast(weight / by - shift, dtype), "f32") + shift
        unchanged = (weight == 0) | (stored == 0) | ~np.isfinite(stored)
        stored = np.where(unchanged, weight, stored)
        weight = np.where(unchanged, 1, weight)
        base = np.where(unchanged, 1, stored)
        return Scale(base / weight, weight / base), stored


class _StreamScales:
    """The scales of one stream, and a lock: the first thread that needs the scales searches them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_searched = False
        self.scale: Scale | None = None
        self.weight: Array | None = None


def fold_scales(folding: ScaleFolding, statistics_id: object) -> Checkpoint:
    """Return the checkpoint of ``folding`` with the scales folded into its tensors.

    ``statistics_id`` identifies the statistics. The view cannot be pickled.
    """
    names = changed_names(folding.graph, folding.touches)
    text = {name: [repr(folding.grids.get(name)), folding.dtypes.get(name, "f32")] for name in names}
    return fold(folding.checkpoint, folding, ViewKey(_scale, folding, [statistics_id, text]), folding.dtypes)


def has_scales(graph: Graph, grids: Mapping[str, Grid], stream: str) -> bool:
    """Return whether scales are searched for ``stream``.

    They are if it is not the residual stream, and a matrix in ``grids`` reads it.
    """
    return stream != RESIDUAL and any(site.name in grids for site, _ in graph.readers.get(stream, ()))


def _scale(checkpoint: Checkpoint, folding: ScaleFolding) -> Checkpoint:
    return fold_scales(replace(folding, checkpoint=checkpoint, results={}), "again")


def _statistics_name(site: Site, index: int) -> str:
    return site.name if len(site.ends) == 1 else f"{site.name}:expert.{index}"
