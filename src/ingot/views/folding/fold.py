"""A view that folds linear maps of streams into the tensors that read or write them, computed on first access."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, cast, numpy_dtype
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part, memory_part
from ingot.model.reading.concat_source import ConcatSource, DecodedRange, verify_part
from ingot.model.reading.view import Verb, derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.quantization.maps import LinearMap, Parts, RepeatableMap
from ingot.stores.temporary import TemporaryFolder
from ingot.views.common import BuildTensor, lazy_tensors
from ingot.views.folding.graph import Ends, Graph, Site


class Folding(Protocol):
    """The linear maps that change the streams of a graph and are folded into its tensors."""

    @property
    def graph(self) -> Graph: ...

    def touches(self, stream: str) -> bool:
        """Return whether the folding may change a stream. Called before any weight is read."""
        ...

    def map_of(self, stream: str) -> RepeatableMap | None:
        """Return the linear map of a stream for which ``touches`` is true, or None if the map is the identity."""
        ...

    def norm_weight(self, stream: str) -> Array:
        """Return the new factor of the norm whose output is ``stream``: f32 [size].

        If the model's norms multiply by 1 + w, this is 1 + w, not w.
        """
        ...


@dataclass(frozen=True, slots=True)
class ViewKey:
    """The data to create a view again: the function, its argument, and the argument as JSON for the view's identity."""

    verb: Verb
    argument: Any
    description: Any


def fold(
    checkpoint: Checkpoint,
    folding: Folding,
    key: ViewKey,
    dtypes: Mapping[str, str],
    new_tensors: Mapping[str, str] | None = None,
    folder: TemporaryFolder | None = None,
) -> Checkpoint:
    """Return the checkpoint with maps of streams folded into its tensors, computed in f32.

    Parameters
    ----------
    checkpoint : Checkpoint
    folding : Folding
    key : ViewKey
    dtypes : mapping
        Element types of the results, by name; f32 for changed tensors without an entry.
    new_tensors : mapping, optional
        For each tensor to add, the name of the tensor from which it is computed. The new tensor must be a site of the
        graph.
    folder : TemporaryFolder, optional
        A folder of companions that replace companions of the checkpoint. It is removed when the view is closed.
    """
    graph = folding.graph

    def builder(name: str, source: str) -> BuildTensor:
        return lambda: _tensor(checkpoint[source], graph.sites[name], folding, dtypes.get(name, "f32"))

    entries: list[tuple[str, BuildTensor | None, str]] = [
        (name, builder(name, name) if _is_touched(graph.sites.get(name), folding.touches) else None, name)
        for name in checkpoint
    ]
    entries += [(name, builder(name, source), name) for name, source in (new_tensors or {}).items()]
    origins = {name: (source,) for name, source in (new_tensors or {}).items()}
    changed = set(changed_names(graph, folding.touches))
    return derive_checkpoint(
        checkpoint,
        lazy_tensors(entries, checkpoint),
        key.verb,
        key.argument,
        key.description,
        origins=origins,
        also_close=None if folder is None else folder.close,
        importance={name: weights for name, weights in checkpoint.importance.items() if name not in changed},
        companions={**checkpoint.companions, **({} if folder is None else folder.paths)},
    )


def changed_names(graph: Graph, touches: Callable[[str], bool]) -> list[str]:
    """Return the names of the tensors that read or write a stream for which ``touches`` is true."""
    return [name for name, site in graph.sites.items() if _is_touched(site, touches)]


def input_map(folding: Folding, ends: Ends) -> RepeatableMap | None:
    """Return the linear map of the inputs of a matrix with ``ends``, or None if its inputs do not change.

    If heads of the stream are repeated in the inputs, the map is repeated in the same way.
    """
    stream_map = folding.map_of(ends.reads) if ends.reads and folding.touches(ends.reads) else None
    if stream_map is None or ends.repeats == 1:
        return stream_map
    return stream_map.repeat(folding.graph.head_size, ends.repeats)


def output_map(folding: Folding, ends: Ends) -> LinearMap | None:
    """Return the linear map of the outputs of a matrix with ``ends``, or None if its outputs do not change."""
    maps = [folding.map_of(stream) if stream and folding.touches(stream) else None for stream, _ in ends.writes]
    if len(maps) == 1:
        return maps[0]
    if not any(maps):
        return None
    return Parts([size if item is None else item for item, (_, size) in zip(maps, ends.writes, strict=True)])


def _is_touched(site: Site | None, touches: Callable[[str], bool]) -> bool:
    if site is None:
        return False
    streams = {stream for ends in site.ends for stream in (ends.reads, *(written for written, _ in ends.writes))}
    return any(stream and touches(stream) for stream in streams)


def _tensor(tensor: Tensor, site: Site, folding: Folding, dtype: str) -> Tensor:
    row = DTYPES[dtype]
    size = tensor.size * DTYPES[dtype].bits // 8
    shape = tensor.shape
    origin = _FoldedOrigin(tensor, site, folding, dtype)
    source = ConcatSource(site.name, [origin], np.array([[0], [0], [size]], np.int64))
    part = Part(row.storage, size, source, type=None if row.is_storage else row.name, where=f"{site.name}: data")
    codec = CODECS[DenseLayout.codec]
    return Tensor(site.name, shape, dtype, codec.id, {DATA: part}, {}, codec, source_bits=tensor.stored_bits)


class _FoldedOrigin:
    """Random access to the bytes of a tensor into which maps are folded.

    If the map of the outputs is the identity, each read computes only its rows. Otherwise the first read computes the
    full tensor, which stays cached until ``release``.
    """

    def __init__(self, tensor: Tensor, site: Site, folding: Folding, dtype: str) -> None:
        self._tensor = tensor
        self._site = site
        self._folding = folding
        self._dtype = dtype
        self._lock = threading.Lock()
        self._cached: memoryview | None = None
        self._rows = DecodedRange(tensor, scattered=False)
        self._by_rows = site.role == "table" or (
            site.role == "matrix"
            and len(site.ends) == 1
            and not any(stream and folding.touches(stream) for stream, _ in site.ends[0].writes)
        )

    def readinto(self, start: int, out: memoryview) -> None:
        if not out.nbytes:
            return
        if self._by_rows:
            self._read_rows(start, out)
            return
        with self._lock:
            if self._cached is None:
                self._cached = self._bytes(self._compute_all())
            out[:] = self._cached[start : start + out.nbytes]

    def changed(self) -> bool:
        return self._rows.changed()

    def verify_sources(self) -> None:
        for part in self._tensor.parts.values():
            verify_part(part)

    def release(self) -> None:
        with self._lock:
            self._cached = None
        self._rows.release()

    def _read_rows(self, start: int, out: memoryview) -> None:
        dtype = numpy_dtype(self._tensor.dtype)
        cols = self._tensor.shape[-1]
        width = cols * DTYPES[self._dtype].bits // 8
        first = start // width
        last = -(-(start + out.nbytes) // width)
        stored = np.empty((last - first, cols), dtype)
        self._rows.readinto(first * cols * dtype.itemsize, stored.reshape(-1).view(np.uint8).data)
        rows = self._bytes(self._map_rows(cast(stored, "f32")))
        out[:] = rows[start - first * width : start - first * width + out.nbytes]

    def _map_rows(self, values: Array) -> Array:
        """Return the rows ``values`` of the tensor with the map of its input stream folded into them."""
        change = input_map(self._folding, self._site.ends[0])
        if change is not None:
            with np.errstate(all="ignore"):  # _require_finite refuses the result
                values = change.forward(values) if self._site.role == "table" else change.back(values)
        return values

    def _compute_all(self) -> Array:
        check_cancelled()
        with np.errstate(all="ignore"):  # _require_finite refuses the result
            return self._compute()

    def _compute(self) -> Array:
        site = self._site
        folding = self._folding
        if site.role == "norm":
            stream = site.ends[0].reads
            values = folding.norm_weight(stream)
            return values - np.float32(1) if folding.graph.wiring.shifted else values
        values = self._tensor.numpy("f32")
        if site.role == "bias":
            change = output_map(folding, site.ends[0])
            return values if change is None else change.forward(values[None])[0]
        rows, cols = values.shape[-2:]
        stacked = values.reshape(-1, rows, cols)
        matrices = [self._matrix(stacked[index], ends) for index, ends in enumerate(site.ends)]
        return (matrices[0] if len(matrices) == 1 else np.stack(matrices)).reshape(values.shape)

    def _matrix(self, values: Array, ends: Ends) -> Array:
        inputs = input_map(self._folding, ends)
        outputs = output_map(self._folding, ends)
        if inputs is not None:
            values = inputs.back(values)
        if outputs is not None:
            values = np.ascontiguousarray(outputs.forward(np.ascontiguousarray(values.T)).T)
        return values

    def _require_finite(self, values: Array) -> Array:
        if not np.isfinite(values).all():
            raise CodecError("fold.value", "expected finite weights, found NaN or infinity", where=self._site.name)
        return values

    def _bytes(self, values: Array) -> memoryview:
        row = DTYPES[self._dtype]
        return memory_part(
            self._require_finite(cast(values, self._dtype)), row.storage, None if row.is_storage else row.name
        ).view()
