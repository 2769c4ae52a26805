"""The pipeline of a conversion: one thread reads, several encode, the caller's thread writes, under one memory budget.

Everything is handed on in order, so the output does not depend on the number of threads or on how a tensor is cut
into slabs.
What bounds memory is one ``Budget`` that a slab's cost is taken from before it is read and given back after it is
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

from ingot.codecs.base import Encoder, Relay, ready, row_step
from ingot.codecs.table import CODECS
from ingot.core.buffers import recycling, scratch
from ingot.core.dtypes import DTYPES, numpy_dtype
from ingot.core.memory import format_size
from ingot.core.parallel import Halt, Workers, adopt
from ingot.core.stats import measure
from ingot.engine.slabs import matrix_of, slabs
from ingot.engine.work import SLAB_ELEMENTS, Cut, Encoded, Take, Work
from ingot.errors import CodecError, IngotError, ResourceError
from ingot.model.part import StoredReader
from ingot.model.tensor import Array, Tensor
from ingot.ops.convert.plan import ENCODED, Step

MOVE_BYTES, MOVE_LEAST = 4 << 20, 1 << 16


class Budget:
    """Bytes that slabs in flight may take; one thread takes, any thread gives back."""

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
class Slab:
    """One slab on its way: ``in_bytes`` of the source are behind it, ``cost`` is what it took from the budget."""

    result: Future[Encoded]
    in_bytes: int
    cost: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The first event of a step."""

    step: Step


@dataclass(frozen=True, slots=True)
class End:
    """All slabs of the step were read and the digests of its source parts fit."""

    step: Step


Event = Begin | Slab | End


def cut(step: Step, budget: int, slots: int, measured: bool) -> Cut:
    """Choose the slab of a step so that ``slots`` of them fit in ``budget`` bytes.

    Raises
    ------
    ResourceError
        Not even the smallest slab fits.
    """
    encoder = step.encoder
    if step.job is not None:
        return _affordable(step.job.cut(budget, slots), budget, step.tensor.name)
    if step.relay is not None:
        return _affordable(_relay_cut(step.relay, budget, slots), budget, step.tensor.name)
    if encoder is None:
        piece = max(MOVE_LEAST, min(MOVE_BYTES, budget // slots))
        return _affordable(Cut(step.in_bytes, 1, piece, min(piece, step.in_bytes)), budget, step.tensor.name)
    tensor = step.tensor
    rows, cols = matrix_of(tensor, encoder.codec)
    per_row = _cost_per_element(step, measured) * cols
    fixed = 0 if CODECS[tensor.codec].streams else whole_cost(tensor)
    if encoder.whole:
        slab_rows = max(rows, 1)
    else:
        slab_rows = min(SLAB_ELEMENTS // max(cols, 1), int((budget - fixed) // (slots * max(per_row, 1))))
        step_rows = row_step(CODECS[encoder.codec], encoder, cols)
        slab_rows = max(1, slab_rows // step_rows) * step_rows
    slab_rows = min(slab_rows, max(rows, 1))
    return _affordable(Cut(rows, cols, slab_rows, int(slab_rows * per_row) + fixed), budget, tensor.name)


def _relay_cut(relay: Relay, budget: int, slots: int) -> Cut:
    per_row = max(relay.memory, 1)
    slab_rows = max(1, min(MOVE_BYTES, budget // slots) // per_row // relay.step) * relay.step
    slab_rows = min(slab_rows, max(relay.rows, 1))
    return Cut(relay.rows, 1, slab_rows, slab_rows * per_row)


def _affordable(cut: Cut, budget: int, where: str) -> Cut:
    if cut.cost > budget:
        raise ResourceError(
            f"expected {format_size(cut.cost)} of working memory for this tensor, found {format_size(max(budget, 0))} "
            f"beside what Python itself takes; raise --max-ram by {format_size(cut.cost - budget)} or more",
            rule="ram.ceiling",
            where=where,
        )
    return cut


def _cost_per_element(step: Step, measured: bool) -> float:
    """Bytes of memory per element of a slab: source rows, stored source, outputs (twice: allocator), scratch."""
    outputs = step.out_bytes if step.encoder is not None and step.encoder.whole else 2 * step.out_bytes
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
    cuts : sequence of Cut
        One per step.
    workers : int
        Encoding threads.
    budget : int
        Bytes for slabs in flight.
    measured : bool
        Measure the error of lossy steps.
    recycled : int
        Bytes of memory that may be kept for the next slab when one is done.

    Iterate over ``events()`` inside a ``with`` block: leaving it, by an exception too, stops and joins every thread.

    Raises
    ------
    MissingExtraError
        A step's encoder works with an optional package that is not installed.
    """

    def __init__(
        self, steps: list[Step], cuts: list[Cut], *, workers: int, budget: int, measured: bool, recycled: int = 0
    ) -> None:
        for step in steps:
            if step.encoder is not None:
                ready(step.encoder)
        self._steps, self._cuts, self._measured = steps, cuts, measured
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
        """Yield ``Begin``, ``Slab``..., ``End`` for each step in order; raise what went wrong while reading."""
        while (item := self._get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def done(self, slab: Slab) -> None:
        """Give a written slab's memory back."""
        self._budget.give(slab.cost)

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
            for step, shape in zip(self._steps, self._cuts, strict=True):
                if not self._read_step(step, shape):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _read_step(self, step: Step, shape: Cut) -> bool:
        learnt = _learn(step, shape)
        if learnt is not None:
            step = replace(step, spec=replace(step.spec, params=dict(learnt)))
        if not self._put(Begin(step)):
            return False
        for work, in_bytes in _work(step, shape, self._measured, lambda: self._budget.take(shape.cost)):
            if self._stop.is_set() or not self._put(Slab(self.pool.submit(work), in_bytes, shape.cost)):
                return False
        return self._put(End(step))


def _learn(step: Step, shape: Cut) -> Mapping[str, Any] | None:
    """Make the passes that come before encoding; return the parameters that they complete, if there are any."""
    if step.job is not None:
        return step.job.learn(shape)
    if step.encoder is None or not step.encoder.scans:
        return None
    _scan(step.tensor, step.encoder, shape)
    return step.encoder.params


def _work(step: Step, shape: Cut, measured: bool, take: Take) -> Iterator[tuple[Work, int]]:
    if step.job is not None:
        yield from step.job.work(shape, take)
    elif step.relay is not None:
        yield from _relay(step.tensor, step.relay, shape, take)
    elif step.encoder is None:
        yield from _move(step.tensor, shape.slab_rows, take)
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


def _relay(tensor: Tensor, relay: Relay, shape: Cut, take: Take) -> Iterator[tuple[Work, int]]:
    """Re-lay slab by slab where they are read: shifting bits is not slower than a disk."""
    share = tensor.nbytes / max(shape.rows, 1)
    reader, start = relay.reader(), 0
    while start < shape.rows or start == 0:
        if not take():
            return
        stop = min(start + shape.slab_rows, shape.rows)
        yield partial(Encoded, reader.read(stop - start)), int(stop * share) - int(start * share)
        start = max(stop, 1)
    reader.finish()


def _scan(tensor: Tensor, encoder: Encoder, shape: Cut) -> None:
    try:
        for _ in range(encoder.scans):
            for rows in slabs(tensor, (shape.rows, shape.cols), shape.slab_rows):
                encoder.scan(rows)
    except CodecError as error:
        raise error.at(tensor.name) from None


def _encode(step: Step, encoder: Encoder, shape: Cut, measured: bool, take: Take) -> Iterator[tuple[Work, int]]:
    tensor = step.tensor
    wants_error = measured and not step.exact and step.action == ENCODED
    share = tensor.nbytes / max(shape.rows, 1)
    reader, start = CODECS[tensor.codec].reader(tensor), 0
    while start < shape.rows or start == 0:
        if not take():
            return
        stop = min(start + shape.slab_rows, shape.rows)
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
