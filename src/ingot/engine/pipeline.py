"""The pipeline of a conversion: one thread reads, several encode, the caller's thread writes, under one memory budget.

Everything is handed on in order, so the output does not depend on the number of threads or on how a tensor is cut
into chunks.
What bounds memory is one ``Budget`` that a chunk's cost is taken from before it is read and given back after it is
written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, Full, Queue
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, Repacked, ready, row_step
from ingot.codecs.table import CODECS
from ingot.core.buffers import recycling, scratch
from ingot.core.dtypes import DTYPES, numpy_dtype
from ingot.core.memory import format_size
from ingot.core.parallel import Halt, Workers, adopt
from ingot.core.stats import measure
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.work import CHUNK_ELEMENTS, Chunking, Encoded, Take, Work
from ingot.errors import CodecError, IngotError, ResourceError
from ingot.model.part import StoredReader
from ingot.model.tensor import Array, Tensor
from ingot.ops.convert.plan import ENCODED, Step

MOVE_BYTES, MOVE_LEAST = 4 << 20, 1 << 16


class Budget:
    """Bytes that chunks in flight may take; one thread takes, any thread gives back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()
        self._stopped = False

    def take(self, amount: int) -> bool:
        """Wait until ``amount`` fits; False if the pipeline was stopped meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._used == 0 or self._used + amount <= self.limit)
            self._used += amount
            return not self._stopped

    def give(self, amount: int) -> None:
        with self._changed:
            self._used -= amount
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk on its way: ``in_bytes`` of the source are behind it, ``cost`` is what it took from the budget."""

    result: Future[Encoded]
    in_bytes: int
    cost: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The first event of a step."""

    step: Step


@dataclass(frozen=True, slots=True)
class End:
    """All chunks of the step were read and the digests of its source parts fit."""

    step: Step


Event = Begin | Chunk | End


def chunking(step: Step, budget: int, slots: int, measured: bool) -> Chunking:
    """Choose the chunk of a step so that ``slots`` of them fit in ``budget`` bytes.

    Raises
    ------
    ResourceError
        Not even the smallest chunk fits.
    """
    encoder = step.encoder
    if step.job is not None:
        return _affordable(step.job.chunking(budget, slots), budget, step.tensor.name)
    if step.repack is not None:
        return _affordable(_repack_chunking(step.repack, budget, slots), budget, step.tensor.name)
    if encoder is None:
        piece = max(MOVE_LEAST, min(MOVE_BYTES, budget // slots))
        return _affordable(Chunking(step.in_bytes, 1, piece, min(piece, step.in_bytes)), budget, step.tensor.name)
    tensor = step.tensor
    rows, cols = matrix_of(tensor, encoder.codec)
    per_row = _cost_per_element(step, measured) * cols
    fixed = 0 if CODECS[tensor.codec].streams else whole_cost(tensor)
    if encoder.single_chunk:
        chunk_rows = max(rows, 1)
    else:
        chunk_rows = min(CHUNK_ELEMENTS // max(cols, 1), int((budget - fixed) // (slots * max(per_row, 1))))
        step_rows = row_step(CODECS[encoder.codec], encoder, cols)
        chunk_rows = max(1, chunk_rows // step_rows) * step_rows
    chunk_rows = min(chunk_rows, max(rows, 1))
    return _affordable(Chunking(rows, cols, chunk_rows, int(chunk_rows * per_row) + fixed), budget, tensor.name)


def _repack_chunking(repack: Repacked, budget: int, slots: int) -> Chunking:
    per_row = max(repack.memory, 1)
    chunk_rows = max(1, min(MOVE_BYTES, budget // slots) // per_row // repack.step) * repack.step
    chunk_rows = min(chunk_rows, max(repack.rows, 1))
    return Chunking(repack.rows, 1, chunk_rows, chunk_rows * per_row)


def _affordable(chunking: Chunking, budget: int, where: str) -> Chunking:
    if chunking.cost > budget:
        raise ResourceError(
            f"expected {format_size(chunking.cost)} of working memory for this tensor, "
            f"found {format_size(max(budget, 0))} beside what Python itself takes; "
            f"raise --max-ram by {format_size(chunking.cost - budget)} or more",
            rule="ram.ceiling",
            where=where,
        )
    return chunking


def _cost_per_element(step: Step, measured: bool) -> float:
    """Bytes of memory per element of a chunk: source rows, stored source, outputs (twice: allocator), scratch."""
    outputs = step.out_bytes if step.encoder is not None and step.encoder.single_chunk else 2 * step.out_bytes
    size = max(step.tensor.size, 1)
    row = DTYPES[step.tensor.dtype].bits / 8
    source = row + decompressed(step.tensor) / size
    error = 4 if measured else 0
    # A codec around another hands it a copy of what is kept, and gets it back to measure the error.
    return source + outputs / size + error + (row + error if "inner" in step.spec.params else 0)


def whole_cost(tensor: Tensor) -> int:
    """Bytes that a reader takes that cannot stream: all values, all parts, and a byte per element to find doubles."""
    return tensor.size * (DTYPES[tensor.dtype].bits // 8 + 1) + decompressed(tensor)


def decompressed(tensor: Tensor) -> int:
    """Return the bytes of all parts, their encoding undone."""
    return sum(part.nbytes for part in tensor.parts.values())


class Pipeline:
    """Runs steps through read, encode and hand-over.

    Parameters
    ----------
    steps : sequence of Step
    chunkings : sequence of Chunking
        One per step.
    workers : int
        Encoding threads.
    budget : int
        Bytes for chunks in flight.
    measured : bool
        Measure the error of lossy steps.
    recycled : int
        Bytes of memory that may be kept for the next chunk when one is done.

    Iterate over ``events()`` inside a ``with`` block: leaving it, by an exception too, stops and joins every thread.

    Raises
    ------
    MissingExtraError
        A step's encoder works with an optional package that is not installed.
    """

    def __init__(
        self,
        steps: list[Step],
        chunkings: list[Chunking],
        *,
        workers: int,
        budget: int,
        measured: bool,
        recycled: int = 0,
    ) -> None:
        for step in steps:
            if step.encoder is not None:
                ready(step.encoder)
        self._steps, self._chunkings, self._measured = steps, chunkings, measured
        self._budget = Budget(budget)
        self._stop = threading.Event()
        self._recycling = recycling(recycled)
        self._queue: Queue[Event | BaseException | None] = Queue(maxsize=4 * workers + 8)
        self.pool = Workers(workers, "ingot-encode")
        self._halt = Halt()
        self._reader = threading.Thread(target=self._read, name="ingot-read", daemon=True)

    def __enter__(self) -> Pipeline:
        self._recycling.__enter__()
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._halt.set()
        self._budget.stop()
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._reader.join()
        self._recycling.__exit__(None, None, None)

    def events(self) -> Iterator[Event]:
        """Yield ``Begin``, ``Chunk``..., ``End`` for each step in order; raise what went wrong while reading."""
        while (item := self._get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def done(self, chunk: Chunk) -> None:
        """Give a written chunk's memory back."""
        self._budget.give(chunk.cost)

    def _get(self) -> Event | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=0.5)  # a bounded wait, so that Ctrl-C is seen on every platform
            except Empty:
                if not self._reader.is_alive() and self._queue.empty():
                    return None

    def _put(self, item: Event | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
            except Full:
                continue
            return True
        return False

    def _read(self) -> None:
        adopt(self._halt)
        try:
            for step, shape in zip(self._steps, self._chunkings, strict=True):
                if not self._read_step(step, shape):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _read_step(self, step: Step, shape: Chunking) -> bool:
        learnt = _learn(step, shape)
        if learnt is not None:
            step = replace(step, spec=replace(step.spec, params=dict(learnt)))
        if not self._put(Begin(step)):
            return False
        for work, in_bytes in _work(step, shape, self._measured, lambda: self._budget.take(shape.cost)):
            if self._stop.is_set() or not self._put(Chunk(self.pool.submit(work), in_bytes, shape.cost)):
                return False
        return self._put(End(step))


def _learn(step: Step, shape: Chunking) -> Mapping[str, Any] | None:
    """Make the passes that come before encoding; return the parameters that they complete, if there are any."""
    if step.job is not None:
        return step.job.learn(shape)
    if step.encoder is None or not step.encoder.fit_passes:
        return None
    _fit(step.tensor, step.encoder, shape)
    return step.encoder.params


def _work(step: Step, shape: Chunking, measured: bool, take: Take) -> Iterator[tuple[Work, int]]:
    if step.job is not None:
        yield from step.job.work(shape, take)
    elif step.repack is not None:
        yield from _repack(step.tensor, step.repack, shape, take)
    elif step.encoder is None:
        yield from _move(step.tensor, shape.chunk_rows, take)
    else:
        yield from _encode(step, step.encoder, shape, measured, take)


def _move(tensor: Tensor, piece: int, take: Take) -> Iterator[tuple[Work, int]]:
    for role, part in tensor.parts.items():
        reader = StoredReader(part)
        for start in range(0, part.length, piece):
            if not take():
                return
            data = np.empty(min(piece, part.length - start), np.uint8)
            reader.readinto(data.data)
            yield partial(Encoded, {role: data}), data.nbytes
        reader.finish()


def _repack(tensor: Tensor, repack: Repacked, shape: Chunking, take: Take) -> Iterator[tuple[Work, int]]:
    """Repack chunk by chunk where they are read: shifting bits is not slower than a disk."""
    share = tensor.nbytes / max(shape.rows, 1)
    reader, start = repack.reader(), 0
    while start < shape.rows or start == 0:
        if not take():
            return
        stop = min(start + shape.chunk_rows, shape.rows)
        yield partial(Encoded, reader.read(stop - start)), int(stop * share) - int(start * share)
        start = max(stop, 1)
    reader.finish()


def _fit(tensor: Tensor, encoder: Encoder, shape: Chunking) -> None:
    try:
        for _ in range(encoder.fit_passes):
            for rows in chunks(tensor, (shape.rows, shape.cols), shape.chunk_rows):
                encoder.fit_pass(rows)
    except CodecError as error:
        raise error.at(tensor.name) from None


def _encode(step: Step, encoder: Encoder, shape: Chunking, measured: bool, take: Take) -> Iterator[tuple[Work, int]]:
    tensor = step.tensor
    wants_error = measured and not step.exact and step.action == ENCODED
    share = tensor.nbytes / max(shape.rows, 1)
    reader, start = CODECS[tensor.codec].reader(tensor), 0
    while start < shape.rows or start == 0:
        if not take():
            return
        stop = min(start + shape.chunk_rows, shape.rows)
        rows = scratch((stop - start, shape.cols), numpy_dtype(tensor.dtype))
        reader.read_into(rows)
        yield _encoding(step, encoder, rows, start, wants_error), int(stop * share) - int(start * share)
        start = max(stop, 1)
    reader.finish()


def _encoding(step: Step, encoder: Encoder, rows: Array, start: int, wants_error: bool) -> Work:
    def work() -> Encoded:
        try:
            parts = encoder.encode(rows, start)
        except IngotError as error:
            raise error.at(step.tensor.name) from None
        if not wants_error:
            return Encoded(parts)
        decoded = np.empty(rows.shape, np.float32)
        encoder.decode(parts, decoded)
        return Encoded(parts, measure(rows, decoded))

    return work
