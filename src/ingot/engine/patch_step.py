"""Chains of deltas of one tensor, and the step that computes a chain's result from its origin and its layers."""

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
from ingot.engine.fit import fit_rows, is_opaque, rows_of, window
from ingot.engine.hashing import HashFactories, HashStream, TensorHashes
from ingot.engine.steps import DECODED
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import IngotError
from ingot.model.tensor import Array, Tensor

_CHUNK = 1 << 20
_EVEN = 1 << 17


@dataclass(frozen=True, slots=True)
class Layer:
    """A delta of one tensor in a chain.

    ``stage`` is its position in the chain. Its result has the element type ``dtype`` and the shape ``shape``.
    """

    stage: int
    tensor: Tensor
    dtype: str
    shape: tuple[int, ...]

    @property
    def codec(self) -> DeltaCodec:
        return delta_codec(self.tensor.codec)

    @property
    def cast(self) -> str | None:
        """The element type to which values are rounded before an exact difference is applied; None for other deltas."""
        return self.tensor.dtype if self.codec.exact else None


@dataclass(frozen=True, slots=True)
class PatchChain:
    """The deltas that lead from a stored tensor to the patched one.

    ``layers`` are applied in order to ``origin``, the tensor at stage ``first_stage``. Stage 0 is the base.
    """

    origin: Tensor
    first_stage: int
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
        """Whether Ingot cannot compute with the values: they are packed below a byte, or their type is unsupported."""
        return is_opaque(self.origin)

    def last_change_before(self, stage: int) -> int:
        """Return the last stage, at most ``stage``, at which a layer changed the values; else the origin's stage."""
        return max((layer.stage for layer in self.layers if layer.stage <= stage), default=self.first_stage)

    def matrix(self, *, by_rows: bool = False) -> tuple[int, int]:
        """Return the rows and columns by which the chain's values are split into chunks of rows.

        If the origin and all layers are elementwise, this is one column of single elements. Exception: with
        ``by_rows``, matrices have full rows. The number of rows is the largest of all stages.
        """
        sizes = [self.origin.size, *(prod(layer.shape) for layer in self.layers if layer.shape != self.origin.shape)]
        vector = len(self.origin.shape) < 2 and len(sizes) > 1  # a vector is a single row whose length differs
        elementwise = CODECS[self.origin.codec].elementwise and all(layer.codec.elementwise for layer in self.layers)
        if elementwise and (vector or not by_rows):
            return max(sizes), 1
        rows, cols = self.origin.matrix_shape
        return (rows, cols) if len(sizes) == 1 else (max(sizes) // cols, cols)

    def appliers(self) -> list[Applier]:
        """Return a new applier for every layer."""
        dtypes = [self.origin.dtype, *(layer.dtype for layer in self.layers)]
        pairs = zip(self.layers, dtypes, strict=False)
        return [layer.codec.applier(layer.tensor, layer.cast or dtype) for layer, dtype in pairs]

    def chunks(self, *, by_rows: bool = False) -> Iterator[Array]:
        """Yield the values after the last layer, in chunks of rows of ``matrix``; checks the digests at the end."""
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
                values = apply_layer(applier, layer, values, window(start, stop, rows_of(layer.shape, cols)))
            if start < last:
                yield values
        reader.finish()
        for applier in appliers:
            applier.finish()


def apply_layer(applier: Applier, layer: Layer, base: Array, rows: int) -> Array:
    """Return the next ``rows`` rows after ``layer``; ``base`` are the same rows before the layer."""
    base = fit_rows(base, rows, layer.cast)
    out = scratch(base.shape, numpy_dtype(layer.cast or layer.dtype))
    applier.apply(base, out)
    return fit_rows(out, rows, layer.dtype)


def result_tensor(route: PatchChain) -> Tensor:
    """Return the chain's origin with the element type and shape of the chain's result.

    The parts of the returned tensor are those of the origin.
    """
    origin = route.origin
    if (origin.dtype, origin.shape) == (route.dtype, route.shape):
        return origin
    return replace(origin, dtype=route.dtype, shape=route.shape)


@dataclass(frozen=True)
class Patch(Step):
    """A step that computes one tensor of a patched checkpoint: the values of ``route``, encoded by ``encoder``.

    ``tensor`` is the origin of the chain with the element type and shape of the result. ``encoder`` was created from
    ``options``. The points at which values are hashed are stages of the chain.
    """

    action: str = field(default=DECODED, init=False)
    route: PatchChain = field(kw_only=True)
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
        # Exact differences have separate chunks; a chunk of theirs that crosses the end of ours is decoded twice.
        count = plan.chunk_rows // _EVEN * _EVEN
        return ChunkPlan(plan.rows, 1, count, int(count * per_element) + fixed)

    def start(self, chunk_plan: ChunkPlan, hash_factories: HashFactories, *, measured: bool) -> _Patching:
        return _Patching(self, chunk_plan, hash_factories, measured)


@dataclass
class _Patching(StepRun[Patch]):
    _streams_by_stage: list[tuple[int, HashStream]] = field(default_factory=list, init=False)

    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        route = self.step.route
        plan = self.chunk_plan
        reader = CODECS[route.origin.codec].reader(route.origin)
        layers = _Layers(self.step)
        self._open_streams()
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
            # In this thread, in the order of tensors, because a parent hash covers several tensors.
            waits = [stream.update(rows) for point, stream in self._streams_by_stage if point == route.first_stage]
            yield (
                partial(layers, Chunk(rows, number, start, stop, stop == plan.rows), self._streams_by_stage, waits),
                int(stop * share) - int(start * share),
            )
            start = max(stop, 1)
            number = number + 1

    def _open_streams(self) -> None:
        """Open a hash stream for each stage to hash. Stages with equal values share a stream of a ``TensorHashes``."""
        shared: dict[int, HashStream] = {}
        for stage, factory in self.hash_factories.items():
            point = self.step.route.last_change_before(stage)
            if isinstance(factory, TensorHashes) and point in shared:
                self.streams[stage] = shared[point]
                continue
            stream = self.streams[stage] = factory.stream(self.step.route.name)
            self._streams_by_stage.append((point, stream))
            if isinstance(factory, TensorHashes):
                shared[point] = stream


@dataclass(frozen=True, slots=True)
class Chunk:
    """The chunk with index ``number`` of the origin's values: rows ``start`` to ``stop``.

    It has fewer rows if the origin ends before ``stop``.
    """

    rows: Array
    number: int
    start: int
    stop: int
    last: bool


class _Sequencer:
    """A lock that the threads of one tensor's chunks acquire in the order of the chunks.

    Threads cannot block each other forever, because the thread pool starts chunks in order.
    """

    def __init__(self) -> None:
        self._next = 0
        self._failed = False
        self._changed = threading.Condition()

    def run(self, number: int, action: Callable[[], None]) -> None:
        """Run ``action`` after the actions of all lower numbers.

        After an action failed, no later action runs, and ``RuntimeError`` is raised instead.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)
            failed = self._failed
        succeeded = False
        try:
            if not failed:
                action()
                succeeded = True
        finally:
            with self._changed:
                self._next += 1
                self._failed = not succeeded
                self._changed.notify_all()
        if failed:
            raise RuntimeError("an earlier chunk of this tensor failed")


class _Layers:
    """The appliers of a chain's layers. Several threads may call it, each for a chunk; chunks are applied in order."""

    def __init__(self, step: Patch) -> None:
        self._step = step
        self._appliers = step.route.appliers()
        self._sequencer = _Sequencer()

    def __call__(
        self, chunk: Chunk, streams: Sequence[tuple[int, HashStream]], waits: list[Future[None]]
    ) -> EncodedChunk:
        values = [chunk.rows]

        def layers() -> None:
            values[0] = self._applied(chunk, streams, waits)

        def in_turn() -> Array:
            self._sequencer.run(chunk.number, layers)
            return values[0]

        return self._encoded(in_turn, waits)

    def _applied(self, chunk: Chunk, streams: Sequence[tuple[int, HashStream]], waits: list[Future[None]]) -> Array:
        values = chunk.rows
        cols = chunk.rows.shape[1]
        for applier, layer in zip(self._appliers, self._step.route.layers, strict=True):
            rows = window(chunk.start, chunk.stop, rows_of(layer.shape, cols))
            values = apply_layer(applier, layer, values, rows)
            waits.extend(stream.update(values) for point, stream in streams if point == layer.stage)
            if chunk.last:
                applier.finish()
        return values

    def _encoded(self, make: Callable[[], Array], waits: list[Future[None]]) -> EncodedChunk:
        try:
            parts = self._step.encoder.encode(make())
        except IngotError as error:
            name = self._step.route.name
            raise error if error.where and name in error.where else error.add_location(name) from None
        for wait in waits:
            wait.result()
        return EncodedChunk(parts)
