"""The view that folds maps of streams into the tensors at their ends; each is computed when its bytes are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, cast, numpy_dtype
from ingot.core.runtime.parallel import go_on
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part, memory_part
from ingot.model.reading.concat_source import ConcatSource, DecodedRange, verify_part
from ingot.model.reading.view import Verb, derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.quantization.maps import LinearMap, Parts, RepeatableMap
from ingot.stores.temporary import TemporaryFolder
from ingot.views.common import Make, mapping
from ingot.views.folding.graph import Ends, Graph, Site


class Folding(Protocol):
    """What becomes of the streams of a graph."""

    @property
    def graph(self) -> Graph: ...

    def touches(self, stream: str) -> bool:
        """Whether a stream is changed; asked before anything is read."""
        ...

    def map_of(self, stream: str) -> RepeatableMap | None:
        """Return the map of a stream; None where it turns out to stay as it is."""
        ...

    def norm(self, stream: str) -> Array:
        """Return what a norm multiplies by that puts out a changed stream: f32 [size], 1 + w where it is shifted."""
        ...


@dataclass(frozen=True, slots=True)
class Told:
    """How a view is made again, and what tells it from others."""

    verb: Verb
    argument: Any
    said: Any


def fold(
    checkpoint: Checkpoint,
    folding: Folding,
    told: Told,
    dtypes: Mapping[str, str],
    more: Mapping[str, str] | None = None,
    folder: TemporaryFolder | None = None,
) -> Checkpoint:
    """Return the checkpoint with maps of streams folded into its tensors, which are computed in f32.

    Parameters
    ----------
    checkpoint : Checkpoint
    folding : Folding
    told : Told
    dtypes : mapping
        What values are rounded to at last, by name; f32 for all others that are changed.
    more : mapping, optional
        Tensors that are made beside those that are there: names of sites in the graph, to the tensors they are made of.
    folder : TemporaryFolder, optional
        Companions that replace those of the checkpoint; removed with the view.
    """
    graph = folding.graph

    def made(name: str, source: str) -> Make:
        return lambda: _tensor(checkpoint[source], graph.sites[name], folding, dtypes.get(name, "f32"))

    entries: list[tuple[str, Make | None, str]] = [
        (name, made(name, name) if _is_touched(graph.sites.get(name), folding.touches) else None, name)
        for name in checkpoint
    ]
    entries += [(name, made(name, source), name) for name, source in (more or {}).items()]
    origins = {name: (source,) for name, source in (more or {}).items()}
    changed = set(changed_names(graph, folding.touches))
    return derive_checkpoint(
        checkpoint,
        mapping(entries, checkpoint),
        told.verb,
        told.argument,
        told.said,
        origins=origins,
        also_close=None if folder is None else folder.close,
        importance={name: weights for name, weights in checkpoint.importance.items() if name not in changed},
        companions={**checkpoint.companions, **({} if folder is None else folder.paths)},
    )


def changed_names(graph: Graph, touches: Callable[[str], bool]) -> list[str]:
    """Return the tensors that change where some streams do."""
    return [name for name, site in graph.sites.items() if _is_touched(site, touches)]


def reading(folding: Folding, ends: Ends) -> RepeatableMap | None:
    """Return the map of a matrix's inputs."""
    found = folding.map_of(ends.reads) if ends.reads and folding.touches(ends.reads) else None
    return found if found is None or ends.times == 1 else found.repeat(folding.graph.head_size, ends.times)


def writing(folding: Folding, ends: Ends) -> LinearMap | None:
    """Return the map of a matrix's outputs."""
    pieces = [folding.map_of(stream) if stream and folding.touches(stream) else None for stream, _ in ends.writes]
    if len(pieces) == 1:
        return pieces[0]
    if not any(pieces):
        return None
    return Parts([size if piece is None else piece for piece, (_, size) in zip(pieces, ends.writes, strict=True)])


def _is_touched(site: Site | None, touches: Callable[[str], bool]) -> bool:
    if site is None:
        return False
    streams = {stream for ends in site.ends for stream in (ends.reads, *(own for own, _ in ends.writes))}
    return any(stream and touches(stream) for stream in streams)


def _tensor(tensor: Tensor, site: Site, folding: Folding, dtype: str) -> Tensor:
    row = DTYPES[dtype]
    size = tensor.size * DTYPES[dtype].bits // 8
    shape = tensor.shape
    origin = _Folded(tensor, site, folding, dtype)
    source = ConcatSource(site.name, [origin], np.array([[0], [0], [size]], np.int64))
    part = Part(row.storage, size, source, type=None if row.is_storage else row.name, where=f"{site.name}: data")
    codec = CODECS[DenseLayout.codec]
    return Tensor(site.name, shape, dtype, codec.id, {DATA: part}, {}, codec, source_bits=tensor.stored_bits)


class _Folded:
    """The bytes of a tensor with maps folded in: an ``Origin``.

    Where the map of the outputs is none, rows are computed as they are asked for; else the tensor is, and held until
    its last byte was read.
    """

    def __init__(self, tensor: Tensor, site: Site, folding: Folding, dtype: str) -> None:
        self._tensor = tensor
        self._site = site
        self._folding = folding
        self._dtype = dtype
        self._lock = threading.Lock()
        self._held: memoryview | None = None
        self._rows = DecodedRange(tensor, scattered=False)
        self._by_rows = site.kind == "table" or (
            site.kind == "matrix"
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
            if self._held is None:
                self._held = self._bytes(self._whole())
            out[:] = self._held[start : start + out.nbytes]

    def changed(self) -> bool:
        return self._rows.changed()

    def verify_sources(self) -> None:
        for part in self._tensor.parts.values():
            verify_part(part)

    def release(self) -> None:
        with self._lock:
            self._held = None
        self._rows.release()

    def _read_rows(self, start: int, out: memoryview) -> None:
        dtype = numpy_dtype(self._tensor.dtype)
        cols = self._tensor.shape[-1]
        width = cols * DTYPES[self._dtype].bits // 8
        first = start // width
        last = -(-(start + out.nbytes) // width)
        stored = np.empty((last - first, cols), dtype)
        self._rows.readinto(first * cols * dtype.itemsize, stored.reshape(-1).view(np.uint8).data)
        rows = self._bytes(self._turned(cast(stored, "f32")))
        out[:] = rows[start - first * width : start - first * width + out.nbytes]

    def _turned(self, values: Array) -> Array:
        """Return rows of a tensor of whose rows each becomes another by itself."""
        change = reading(self._folding, self._site.ends[0])
        if change is not None:
            with np.errstate(all="ignore"):  # what is not finite is refused
                values = change.forward(values) if self._site.kind == "table" else change.back(values)
        return values

    def _whole(self) -> Array:
        go_on()
        with np.errstate(all="ignore"):  # what is not finite is refused
            return self._computed()

    def _computed(self) -> Array:
        site, folding = self._site, self._folding
        if site.kind == "norm":
            stream = site.ends[0].reads
            values = folding.norm(stream)
            return values - np.float32(1) if folding.graph.wiring.shifted else values
        values = self._tensor.numpy("f32")
        if site.kind == "bias":
            change = writing(folding, site.ends[0])
            return values if change is None else change.forward(values[None])[0]
        rows, cols = values.shape[-2:]
        each = values.reshape(-1, rows, cols)
        found = [self._matrix(each[number], ends) for number, ends in enumerate(site.ends)]
        return (found[0] if len(found) == 1 else np.stack(found)).reshape(values.shape)

    def _matrix(self, values: Array, ends: Ends) -> Array:
        inputs = reading(self._folding, ends)
        outputs = writing(self._folding, ends)
        if inputs is not None:
            values = inputs.back(values)
        if outputs is not None:
            values = np.ascontiguousarray(outputs.forward(np.ascontiguousarray(values.T)).T)
        return values

    def _checked(self, values: Array) -> Array:
        if not np.isfinite(values).all():
            raise CodecError("fold.value", "expected finite weights, found NaN or infinity", where=self._site.name)
        return values

    def _bytes(self, values: Array) -> memoryview:
        row = DTYPES[self._dtype]
        return memory_part(
            self._checked(cast(values, self._dtype)), row.storage, None if row.is_storage else row.name
        ).view()
