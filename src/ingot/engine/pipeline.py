"""The pipeline of a plan: one thread reads, several encode, the caller's thread writes, under one memory budget.

Everything is handed on in order, so the output does not depend on the number of threads or on how a tensor is cut
into chunks.
What bounds memory is one ``Budget`` that a chunk's cost is taken from before it is read and given back after it is
written. Events are handed from thread to thread in batches: waking a thread takes longer than a small chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from queue import Empty, Full, Queue
from typing import Any, Protocol

from ingot.core.bytes import encodings
from ingot.core.numeric.buffers import recycling
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.numeric.stats import ErrorStats
from ingot.core.runtime.parallel import CancelToken, Workers, inherit_token
from ingot.engine.watch import Watches
from ingot.engine.work import ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.model.bytesource import Buffer
from ingot.model.spec import TensorSpec


class TensorWriter(Protocol):
    """What takes a tensor's bytes; a ``FormatWriter`` is one."""

    def begin(self, spec: TensorSpec) -> None: ...

    def write(self, role: str, data: Buffer) -> None: ...

    def end(self) -> dict[str, Any]: ...


class TensorSink:
    """Hands one tensor's bytes to a writer.

    Parameters
    ----------
    writer : TensorWriter
        ``begin`` is called here, ``end`` by ``close``.
    spec : TensorSpec
    compress : bool
        Whether the bytes still have to be encoded as the spec says; False for parts moved as stored.
    pool : Executor
    pending : int
        Frames in flight at most.
    """

    def __init__(self, writer: TensorWriter, spec: TensorSpec, *, compress: bool, pool: Executor, pending: int) -> None:
        self._writer = writer
        self._pool = pool
        self._limit = pending
        self._frames: deque[tuple[str, Future[bytes], int]] = deque()
        encoded = {part.role: part.encoding for part in spec.parts if part.encoding != "raw"} if compress else {}
        self._cutters = {role: bytearray() for role in encoded}
        self._tables: dict[str, list[tuple[int, int]]] = {
            role: [] for role, encoding in encoded.items() if encoding == encodings.SEEKABLE
        }
        writer.begin(spec)

    def write(self, parts: Mapping[str, Any]) -> None:
        """Take the next bytes of each part."""
        for role, array in parts.items():
            data = array if isinstance(array, memoryview) else file_bytes(array)
            if role in self._cutters:
                self._cut(role, data)
            elif data.nbytes:
                self._writer.write(role, data)

    def close(self) -> dict[str, Any]:
        """Write what is left and end the tensor; returns the writer's record of it."""
        for role, rest in self._cutters.items():
            if rest:
                self._submit(role, bytes(rest))
        self._drain(0)
        for role, frames in self._tables.items():
            self._writer.write(role, encodings.seek_table(frames))
        return self._writer.end()

    def _cut(self, role: str, data: memoryview) -> None:
        rest = self._cutters[role]
        position = 0
        while len(rest) + data.nbytes - position >= encodings.FRAME:
            stop = position + encodings.FRAME - len(rest)
            self._submit(role, bytes(rest) + bytes(data[position:stop]) if rest else bytes(data[position:stop]))
            rest.clear()
            position = stop
        rest += data[position:]

    def _submit(self, role: str, frame: bytes) -> None:
        self._drain(self._limit - 1)
        compress = encodings.seekable_frame if role in self._tables else encodings.compress_frame
        self._frames.append((role, self._pool.submit(compress, frame), len(frame)))

    def _drain(self, keep: int) -> None:
        while len(self._frames) > keep:
            role, made, size = self._frames.popleft()
            frame = made.result()
            if role in self._tables:
                self._tables[role].append((len(frame), size))
            self._writer.write(role, frame)


Watching = Callable[[Step], Watches]

# A batch is handed on when its chunks take so many bytes of budget, or when it has so many events.
_BATCH_BYTES = 1 << 18
_BATCH_EVENTS = 192


def nothing(step: Step) -> Watches:
    """Hash nothing of a step."""
    return {}


class Budget:
    """Bytes that chunks in flight may take; one thread takes, any thread gives back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()
        self._stopped = False

    def take_now(self, amount: int) -> bool:
        """Take ``amount`` if it fits without waiting."""
        with self._changed:
            fits = self._used == 0 or self._used + amount <= self.limit
            self._used += amount if fits else 0
            return fits and not self._stopped

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


Outcome = EncodedChunk | BaseException


@dataclass(slots=True)
class Batch:
    """Events that are handed on together, and the works of their chunks, which one thread of the pool does in order."""

    events: list[Event] = field(default_factory=list)
    works: list[ChunkTask] = field(default_factory=list)
    cost: int = 0
    outcomes: Future[list[Outcome]] | None = None

    @property
    def is_full(self) -> bool:
        return self.cost >= _BATCH_BYTES or len(self.events) >= _BATCH_EVENTS

    def taken(self) -> Iterator[Event]:
        """Yield the events, each of which is let go of."""
        self.events.reverse()
        while self.events:
            yield self.events.pop()

    def chunk(self, work: ChunkTask, in_bytes: int, cost: int) -> None:
        """Add a chunk that ``work`` makes."""
        self.events.append(Chunk(self, len(self.works), in_bytes, cost))
        self.works.append(work)
        self.cost += cost

    def submit(self, pool: Workers) -> None:
        """Start the batch's work in the pool."""
        if self.works:
            works = self.works
            self.works = []
            self.outcomes = pool.submit(_outcomes, works)


def _outcomes(works: list[ChunkTask]) -> list[Outcome]:
    """Do all, whatever becomes of one: threads may wait for one after it."""
    works.reverse()
    return [_outcome(works.pop()) for _ in range(len(works))]  # what is done holds its input no longer


def _outcome(work: ChunkTask) -> Outcome:
    try:
        return work()
    except BaseException as error:
        return error


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk on its way: ``in_bytes`` of the source are behind it, ``cost`` is what it took from the budget."""

    batch: Batch
    index: int
    in_bytes: int
    cost: int

    def result(self) -> EncodedChunk:
        """Wait for what became of the chunk, and let go of it; raises what its work raised."""
        assert self.batch.outcomes is not None
        outcomes = self.batch.outcomes.result()
        outcome, outcomes[self.index] = outcomes[self.index], _TAKEN
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


_TAKEN = RuntimeError("this chunk was taken before")


@dataclass(frozen=True, slots=True)
class Begin:
    """The first event of a step, whose spec has what was learnt."""

    step: Step
    running: StepRun[Any]


@dataclass(frozen=True, slots=True)
class End:
    """All chunks of the step were read and the digests of its source parts fit."""

    step: Step
    running: StepRun[Any]


Event = Begin | Chunk | End


class Pipeline:
    """Runs steps through read, encode and hand-over.

    Parameters
    ----------
    steps : sequence of Step
    chunk_plans : sequence of ChunkPlan
        One per step.
    workers : int
        Encoding threads.
    budget : int
        Bytes for chunks in flight.
    measured : bool
        Measure the error of lossy steps.
    recycled : int
        Bytes of memory that may be kept for the next chunk when one is done.
    watching : callable
        Returns what is hashed of a step; called in the steps' order when each begins.

    Iterate over ``events()`` inside a ``with`` block: leaving it, by an exception too, stops and joins every thread.

    Raises
    ------
    MissingExtraError
        A step works with an optional package that is not installed.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        chunk_plans: Sequence[ChunkPlan],
        *,
        workers: int,
        budget: int,
        measured: bool,
        recycled: int = 0,
        watching: Watching = nothing,
    ) -> None:
        for step in steps:
            if step.encoder is not None:
                step.encoder.ready()
        self._steps = steps
        self._chunk_plans = chunk_plans
        self._measured = measured
        self._watching = watching
        self._budget = Budget(budget)
        self._stop = threading.Event()
        self._recycling = recycling(recycled)
        self._queue: Queue[Batch | BaseException | None] = Queue(maxsize=4 * workers + 8)
        self._batch = Batch()
        self.pool = Workers(workers, "ingot-encode")
        self._halt = CancelToken()
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
            yield from item.taken()

    def done(self, chunk: Chunk) -> None:
        """Give the memory of what is written back."""
        self._budget.give(chunk.cost)

    def _get(self) -> Batch | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=0.5)  # a bounded wait, so that Ctrl-C is seen on every platform
            except Empty:
                if not self._reader.is_alive() and self._queue.empty():
                    return None

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
            except Full:
                continue
            return True
        return False

    def _flush(self) -> bool:
        """Hand on the events that wait; False if the pipeline was stopped."""
        batch = self._batch
        self._batch = Batch()
        try:
            batch.submit(self.pool)
        except RuntimeError:  # the pool takes no more work
            if not self._stop.is_set():
                raise
        return not self._stop.is_set() and (not batch.events or self._put(batch))

    def _acquire(self, cost: int) -> bool:
        """Wait for a chunk's memory; hand on the batch first if its chunks hold that memory."""
        return self._budget.take_now(cost) or (self._flush() and self._budget.take(cost))

    def _read(self) -> None:
        inherit_token(self._halt)
        try:
            for step, chunk_plan in zip(self._steps, self._chunk_plans, strict=True):
                if not self._read_step(step, chunk_plan):
                    return
            if self._flush():
                self._put(None)
        except BaseException as error:
            if self._flush():
                self._put(error)

    def _read_step(self, step: Step, chunk_plan: ChunkPlan) -> bool:
        """Add the events of a step to the batch, and hand on each full batch; False if the pipeline was stopped."""
        running = step.start(chunk_plan, self._watching(step), measured=self._measured)
        learnt = running.fit()
        if learnt is not None:
            step = replace(step, spec=replace(step.spec, params=dict(learnt)))
        self._batch.events.append(Begin(step, running))
        for work, in_bytes in running.tasks(lambda: self._acquire(chunk_plan.cost)):
            self._batch.chunk(work, in_bytes, chunk_plan.cost)
            if self._batch.is_full and not self._flush():
                return False
        self._batch.events.append(End(step, running))
        return not self._batch.is_full or self._flush()


class Sink(Protocol):
    """Where one tensor's bytes go."""

    def write(self, parts: Mapping[str, Any]) -> None:
        """Take the next bytes of each part."""
        ...

    def close(self) -> dict[str, Any]:
        """End the tensor; return the writer's record of it."""
        ...


def drive(
    pipeline: Pipeline,
    opened: Callable[[Begin], Sink],
    finished: Callable[[End, dict[str, Any], ErrorStats], None],
    advance: Callable[[int, str], None],
) -> None:
    """Write the chunks of a pipeline in order.

    ``opened`` returns the sink of the next tensor. ``finished`` receives the end of a tensor, its record and the sum of
    its errors. ``advance`` receives the number of bytes that were read. Raises the errors of the pipeline's threads.
    """
    sink: Sink | None = None
    error = ErrorStats()
    for event in pipeline.events():
        if isinstance(event, Begin):
            sink = opened(event)
            error = ErrorStats()
            advance(0, event.step.tensor.name)
        elif isinstance(event, Chunk):
            assert sink is not None
            encoded = event.result()
            sink.write(encoded.parts)
            if encoded.commit is not None:
                encoded.commit()
            error = error + (encoded.error or ErrorStats())
            pipeline.done(event)
            advance(event.in_bytes, "")
        elif isinstance(event, End):
            assert sink is not None
            finished(event, sink.close(), error)
