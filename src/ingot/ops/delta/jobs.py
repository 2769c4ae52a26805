"""The pipeline's work on two versions of a tensor: reading both, encoding their difference, hashing them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from math import gcd
from typing import Any

from ingot.codecs.base import Encoder, forget, held
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder
from ingot.codecs.table import CODECS
from ingot.core.buffers import scratch
from ingot.core.checksums import Blake3
from ingot.core.dtypes import DTYPES, numpy_dtype
from ingot.core.floats import FLOATS
from ingot.core.stats import measure
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.pipeline import decompressed, whole_cost
from ingot.engine.watch import Feed, Watch
from ingot.engine.work import CHUNK_ELEMENTS, Chunking, Encoded, Take, Work
from ingot.errors import IngotError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor
from ingot.ops.identity import file_bytes, hex_of


def fixed_cost(*tensors: Tensor) -> int:
    """Bytes that readers take which cannot stream."""
    found = (CODECS[tensor.codec] for tensor in tensors)
    return sum(0 if codec.streams else whole_cost(item) for codec, item in zip(found, tensors, strict=True))


def per_element(*tensors: Tensor) -> float:
    """Bytes per element that reading chunks of these tensors takes."""
    return sum(DTYPES[item.dtype].bits / 8 + decompressed(item) / max(item.size, 1) for item in tensors)


def chunk_rows(rows: int, cols: int, per_row: float, room: float, step: int) -> int:
    """Return the rows of a chunk: not more than ``room`` takes, a multiple of ``step``, never none."""
    count = min(CHUNK_ELEMENTS // max(cols, 1), int(room // max(per_row, 1)))
    return min(max(1, count // step) * step, max(rows, 1))


class PairJob:
    """Stores the difference of two tensors of one shape and element type.

    ``base_id`` and ``result_id`` are the digests of the base and of what patching will give, after the last chunk;
    ``squared_difference`` is the squared norm of the difference, where errors were measured.
    """

    def __init__(
        self, base: Tensor, tuned: Tensor, codec: DeltaCodec, encoder: DeltaEncoder, parts: tuple[PartSpec, ...]
    ) -> None:
        self.base, self.tuned = base, tuned
        self._codec, self._encoder, self._parts = codec, encoder, parts
        self._result = Blake3()
        self._base_watch: Watch | None = None
        self._tuned_watch: Watch | None = None
        self._feeds: tuple[Feed | None, Feed | None] = (None, None)
        self._measured = False
        self.squared_difference = 0.0

    def observe(self, base: Watch | None, tuned: Watch | None, *, measured: bool) -> None:
        """Say before the work begins what is to be hashed and whether errors are to be measured."""
        self._base_watch, self._tuned_watch = base, tuned
        self._measured = measured and self.tuned.dtype in FLOATS

    @property
    def base_id(self) -> str | None:
        feed = self._feeds[0]
        return feed.hex if feed else None

    @property
    def result_id(self) -> str | None:
        if self._tuned_watch is None:
            return None
        feed = self._feeds[1]
        return feed.hex if feed else hex_of(self._result)

    @property
    def _rebuilds(self) -> bool:
        return not self._encoder.lossless and (self._measured or self._tuned_watch is not None)

    @property
    def held(self) -> int:
        """As of ``codecs.base.held``."""
        return held(self._encoder)

    def forget(self) -> None:
        """As of ``codecs.base.forget``."""
        forget(self._encoder)

    def chunking(self, budget: int, slots: int) -> Chunking:
        elementwise = self._codec.elementwise and CODECS[self.base.codec].elementwise
        rows, cols = matrix_of(self.tuned) if elementwise else self.tuned.matrix_shape
        out = sum(part.at_most for part in self._parts) / max(self.tuned.size, 1)
        cost = per_element(self.base, self.tuned) + 2 * out + 8 + (8 if self._rebuilds else 0)
        fixed = fixed_cost(self.base, self.tuned)
        step = self._encoder.step
        if self._codec.elementwise and cols:
            step = step // gcd(step, cols)
        room = (budget - fixed) / slots
        count = max(rows, 1) if self._encoder.single_chunk else chunk_rows(rows, cols, cost * cols, room, step)
        return Chunking(rows, cols, count, int(count * cost * cols) + fixed)

    def learn(self, shape: Chunking) -> Mapping[str, Any] | None:
        if not self._encoder.fit_passes:
            return None
        matrix = (shape.rows, shape.cols)
        for _ in range(self._encoder.fit_passes):
            pairs = (chunks(tensor, matrix, shape.chunk_rows) for tensor in (self.base, self.tuned))
            for old, new in zip(*pairs, strict=True):
                try:
                    self._encoder.fit_pass(old, new)
                except IngotError as error:
                    raise error.at(self.tuned.name) from None
        return self._encoder.params

    def work(self, shape: Chunking, take: Take) -> Iterator[tuple[Work, int]]:
        readers = [CODECS[tensor.codec].reader(tensor) for tensor in (self.base, self.tuned)]
        self._feeds = (
            self._base_watch.tensor(self.base.name) if self._base_watch else None,
            self._tuned_watch.tensor(self.tuned.name) if self._tuned_watch and self._encoder.lossless else None,
        )
        share = (self.base.nbytes + self.tuned.nbytes) / max(shape.rows, 1)
        kinds, start = [numpy_dtype(tensor.dtype) for tensor in (self.base, self.tuned)], 0
        while start < shape.rows or start == 0:
            if not take():
                return
            stop = min(start + shape.chunk_rows, shape.rows)
            pair = [scratch((stop - start, shape.cols), kind) for kind in kinds]
            for reader, rows in zip(readers, pair, strict=True):
                reader.read_into(rows)
            waits = [feed.take(rows) for feed, rows in zip(self._feeds, pair, strict=True) if feed]
            yield partial(self._encode, pair[0], pair[1], start, waits), int(stop * share) - int(start * share)
            start = max(stop, 1)
        for reader in readers:
            reader.finish()

    def _settle(self, moved: float, data: Any) -> None:
        """Take in what a chunk told, in order."""
        self.squared_difference += moved
        if self._tuned_watch is not None:
            self._result.update(data)

    def _encode(self, old: Array, new: Array, start: int, waits: list[Future[None]]) -> Encoded:
        try:
            parts = self._encoder.encode(old, new, start)
        except IngotError as error:
            name = self.tuned.name
            raise error if error.where and name in error.where else error.at(name) from None
        stats, settle = None, None
        if self._rebuilds:
            rebuilt = scratch(new.shape, new.dtype)
            self._encoder.rebuild(parts, old, rebuilt)
            stats = measure(new, rebuilt) if self._measured else None
            moved = measure(new, old).squared_error if self._measured and self.base.dtype in FLOATS else 0.0
            settle = partial(self._settle, moved, file_bytes(rebuilt) if self._tuned_watch is not None else b"")
        for wait in waits:
            wait.result()
        return Encoded(parts, stats, settle)


class WholeJob:
    """Stores a tensor of the fine-tune itself, without loss, and hashes it meanwhile."""

    def __init__(self, tuned: Tensor, encoder: Encoder) -> None:
        self.tuned, self._encoder = tuned, encoder
        self._watch: Watch | None = None
        self._feed: Feed | None = None

    def observe(self, base: Watch | None, tuned: Watch | None, *, measured: bool) -> None:
        """As of ``PairJob``; there is no base."""
        self._watch = tuned

    @property
    def base_id(self) -> str | None:
        return None

    @property
    def result_id(self) -> str | None:
        return self._feed.hex if self._feed else None

    def chunking(self, budget: int, slots: int) -> Chunking:
        codec = CODECS[self._encoder.codec]
        rows, cols = matrix_of(self.tuned, codec.id)
        out = sum(part.at_most for part in self._encoder.parts) / max(self.tuned.size, 1)
        cost, fixed = per_element(self.tuned) + 2 * out, fixed_cost(self.tuned)
        step = self._encoder.step // gcd(self._encoder.step, cols) if codec.elementwise and cols else self._encoder.step
        count = chunk_rows(rows, cols, cost * cols, (budget - fixed) / slots, step)
        return Chunking(rows, cols, count, int(count * cost * cols) + fixed)

    def learn(self, shape: Chunking) -> Mapping[str, Any] | None:
        return None

    def work(self, shape: Chunking, take: Take) -> Iterator[tuple[Work, int]]:
        tensor = self.tuned
        self._feed = self._watch.tensor(tensor.name) if self._watch else None
        reader, start = CODECS[tensor.codec].reader(tensor), 0
        share = tensor.nbytes / max(shape.rows, 1)
        while start < shape.rows or start == 0:
            if not take():
                return
            stop = min(start + shape.chunk_rows, shape.rows)
            rows = scratch((stop - start, shape.cols), numpy_dtype(tensor.dtype))
            reader.read_into(rows)
            wait = self._feed.take(rows) if self._feed else None
            yield partial(self._encode, rows, start, wait), int(stop * share) - int(start * share)
            start = max(stop, 1)
        reader.finish()

    def _encode(self, rows: Array, start: int, wait: Future[None] | None) -> Encoded:
        parts = self._encoder.encode(rows, start)
        if wait is not None:
            wait.result()
        return Encoded(parts)
