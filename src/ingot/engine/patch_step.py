"""How a tensor of a chain of deltas comes about, and the step that makes it: read its origin, apply every layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from ingot.codecs.base import Encoder, empty
from ingot.codecs.delta.base import Applier, DeltaCodec, delta_codec
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.runtime.parallel import check_cancelled
from ingot.engine import resources as cost
from ingot.engine.fit import fitted, is_opaque, rows_of, window
from ingot.engine.steps import DECODED
from ingot.engine.watch import ContentWatch, Feed, Watches
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import IngotError
from ingot.model.tensor import Array, Tensor

_CHUNK = 1 << 20
_EVEN = 1 << 17


@dataclass(frozen=True, slots=True)
class Layer:
    """A difference that leads to ``stage``; its result has element type ``dtype`` and shape ``shape``."""

    stage: int
    tensor: Tensor
    dtype: str
    shape: tuple[int, ...]

    @property
    def codec(self) -> DeltaCodec:
        return delta_codec(self.tensor.codec)

    @property
    def cast(self) -> str | None:
        """The element type that the base's values are rounded to first, if the difference is one of bits."""
        return self.tensor.dtype if self.codec.exact else None


@dataclass(frozen=True, slots=True)
class Route:
    """How a tensor comes about: ``origin`` is there since stage ``born`` (0: the base's), ``layers`` are applied."""

    origin: Tensor
    born: int
    layers: tuple[Layer, ...] = ()

    @property
    def name(self) -> str:
        return self.origin.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layers[-1].shape if self.layers else self.origin.shape

    @property
    def dtype(self) -> str:
        return self.layers[-1].dtype if self.layers else self.origin.dtype

    @property
    def resized(self) -> bool:
        """Whether a layer changes the number of rows."""
        return any(layer.shape != self.origin.shape for layer in self.layers)

    @property
    def opaque(self) -> bool:
        """Whether its values only move: packed below a byte, or of a type not known here."""
        return is_opaque(self.origin)

    def made_at(self, stage: int) -> int:
        """Return the stage that gave the values which the tensor has at ``stage``."""
        return max((layer.stage for layer in self.layers if layer.stage <= stage), default=self.born)

    def matrix(self, *, by_rows: bool = False) -> tuple[int, int]:
        """Return the rows and columns to cut by: single elements where everything works element by element.

        ``by_rows`` asks for whole rows. The rows are those of the stage that has most of them.
        """
        sizes = [self.origin.size, *(prod(layer.shape) for layer in self.layers if layer.shape != self.origin.shape)]
        vector = len(self.origin.shape) < 2 and len(sizes) > 1  # one row in general: its length differs
        elementwise = CODECS[self.origin.codec].elementwise and all(layer.codec.elementwise for layer in self.layers)
        if elementwise and (vector or not by_rows):
            return max(sizes), 1
        rows, cols = self.origin.matrix_shape
        return (rows, cols) if len(sizes) == 1 else (max(sizes) // cols, cols)

    def appliers(self) -> list[Applier]:
        """Begin applying every layer."""
        dtypes = [self.origin.dtype, *(layer.dtype for layer in self.layers)]
        pairs = zip(self.layers, dtypes, strict=False)
        return [layer.codec.applier(layer.tensor, layer.cast or dtype) for layer, dtype in pairs]

    def chunks(self, *, by_rows: bool = False) -> Iterator[Array]:
        """Yield the values in fresh arrays, in bounded memory, digests checked at the end; cut by ``matrix``."""
        rows, cols = self.matrix(by_rows=by_rows)
        step = max(1, _CHUNK // max(cols, 1))
        first = rows_of(self.origin.shape, cols)
        last = rows_of(self.shape, cols)
        reader = CODECS[self.origin.codec].reader(self.origin)
        appliers = self.appliers()
        for start in range(0, rows, step):
            check_cancelled()
            stop = min(start + step, rows)
            values = empty((window(start, stop, first), cols), self.origin.dtype, self.name)
            reader.read_into(values)
            for applier, layer in zip(appliers, self.layers, strict=True):
                values = applied(applier, layer, values, window(start, stop, rows_of(layer.shape, cols)))
            if start < last:
                yield values
        reader.finish()
        for applier in appliers:
            applier.finish()


def applied(applier: Applier, layer: Layer, base: Array, rows: int) -> Array:
    """Return the next ``rows`` rows that a layer makes, ``base`` being those before it."""
    base = fitted(base, rows, layer.cast)
    out = scratch(base.shape, numpy_dtype(layer.cast or layer.dtype))
    applier.apply(base, out)
    return fitted(out, rows, layer.dtype)


def at_end(route: Route) -> Tensor:
    """Return a route's origin with the element type and shape of its end."""
    origin = route.origin
    if (origin.dtype, origin.shape) == (route.dtype, route.shape):
        return origin
    return replace(origin, dtype=route.dtype, shape=route.shape)


@dataclass(frozen=True)
class Patch(Step):
    """Makes one tensor of a patch's result: the values of ``route``, encoded by ``encoder`` of ``options``.

    ``tensor`` is the route's origin with the element type and shape of its end. Values pass at the stages that give
    them.
    """

    action: str = field(default=DECODED, init=False)
    route: Route = field(kw_only=True)
    encoder: Encoder = field(kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def in_bytes(self) -> int:
        return self.route.origin.nbytes + sum(layer.tensor.nbytes for layer in self.route.layers)

    @property
    def decodes(self) -> Tensor | None:
        return self.route.origin

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        route = self.route
        out = self.spec.parts[0]
        matrix = route.matrix()
        per_element = cost.per_element(route.origin) + DTYPES[out.type or out.dtype].bits / 8
        fixed = cost.fixed_cost(route.origin)
        for layer in route.layers:
            stored = cost.decompressed(layer.tensor) / max(matrix[0] * matrix[1], 1)
            per_element += 8 + DTYPES[layer.dtype].bits / 8 + 2 * stored
            codec = CODECS.get(layer.tensor.codec)
            if codec is not None and not codec.streams:
                fixed += cost.whole_cost(layer.tensor)
        plan = cost.by_rows(matrix, per_element * matrix[1], fixed, budget, 1)
        if matrix[1] != 1 or plan.chunk_rows <= _EVEN:
            return plan
        # Exact differences are applied in chunks of their own; one that ends inside of ours costs twice.
        count = plan.chunk_rows // _EVEN * _EVEN
        return ChunkPlan(plan.rows, 1, count, int(count * per_element) + fixed)

    def start(self, chunk_plan: ChunkPlan, watches: Watches, *, measured: bool) -> _Patching:
        return _Patching(self, chunk_plan, watches, measured)


@dataclass
class _Patching(StepRun[Patch]):
    _taps: list[tuple[int, Feed]] = field(default_factory=list, init=False)

    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        route, plan = self.step.route, self.chunk_plan
        reader = CODECS[route.origin.codec].reader(route.origin)
        layers = _Layers(self.step)
        self._open_feeds()
        share = self.step.in_bytes / max(plan.rows, 1)
        start = 0
        number = 0
        origin_rows = rows_of(route.origin.shape, plan.cols)
        while start < plan.rows or start == 0:
            if not acquire():
                return
            stop = min(start + plan.chunk_rows, plan.rows)
            rows = scratch((window(start, stop, origin_rows), plan.cols), numpy_dtype(route.origin.dtype))
            reader.read_into(rows)
            if stop == plan.rows:
                reader.finish()
            # Here, in the order of tensors: a parent hash goes on from one to the next.
            waits = [feed.take(rows) for point, feed in self._taps if point == route.born]
            yield (
                partial(layers, Chunk(rows, number, start, stop, stop == plan.rows), self._taps, waits),
                int(stop * share) - int(start * share),
            )
            start = max(stop, 1)
            number = number + 1

    def _open_feeds(self) -> None:
        """Begin a hash per stage; stages at which a tensor has the same values share one."""
        shared: dict[int, Feed] = {}
        for stage, watch in self.watches.items():
            point = self.step.route.made_at(stage)
            if isinstance(watch, ContentWatch) and point in shared:
                self.feeds[stage] = shared[point]
                continue
            feed = self.feeds[stage] = watch.tensor(self.step.route.name)
            self._taps.append((point, feed))
            if isinstance(watch, ContentWatch):
                shared[point] = feed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The values of a route's origin from row ``start`` to ``stop``: fewer, if the origin has not so many rows."""

    rows: Array
    number: int
    start: int
    stop: int
    last: bool


class _Sequencer:
    """A lock that several threads acquire in the order of their chunks of one tensor.

    The thread pool starts chunks in order. When a thread waits, the thread of the preceding chunk is running or done.
    """

    def __init__(self) -> None:
        self._next = 0
        self._failed = False
        self._changed = threading.Condition()

    def run(self, number: int, action: Callable[[], None]) -> None:
        """Wait until all numbers below have run ``action``, then run it; after a failure nothing runs any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)
            failed = self._failed
        done = False
        try:
            if not failed:
                action()
                done = True
        finally:
            with self._changed:
                self._next += 1
                self._failed = not done
                self._changed.notify_all()
        if failed:
            raise RuntimeError("an earlier chunk of this tensor failed")


class _Layers:
    """Applies a route's layers to its chunks, in order, whichever threads they come on."""

    def __init__(self, step: Patch) -> None:
        self._step = step
        self._appliers = step.route.appliers()
        self._sequencer = _Sequencer()

    def __call__(self, chunk: Chunk, taps: Sequence[tuple[int, Feed]], waits: list[Future[None]]) -> EncodedChunk:
        values = [chunk.rows]

        def layers() -> None:
            values[0] = self._applied(chunk, taps, waits)

        def in_turn() -> Array:
            self._sequencer.run(chunk.number, layers)
            return values[0]

        return self._encoded(in_turn, waits)

    def _applied(self, chunk: Chunk, taps: Sequence[tuple[int, Feed]], waits: list[Future[None]]) -> Array:
        values, cols = chunk.rows, chunk.rows.shape[1]
        for applier, layer in zip(self._appliers, self._step.route.layers, strict=True):
            rows = window(chunk.start, chunk.stop, rows_of(layer.shape, cols))
            values = applied(applier, layer, values, rows)
            waits.extend(feed.take(values) for point, feed in taps if point == layer.stage)
            if chunk.last:
                applier.finish()
        return values

    def _encoded(self, make: Callable[[], Array], waits: list[Future[None]]) -> EncodedChunk:
        try:
            parts = self._step.encoder.encode(make())
        except IngotError as error:
            name = self._step.route.name
            raise error if error.where and name in error.where else error.at(name) from None
        for wait in waits:
            wait.result()
        return EncodedChunk(parts)
