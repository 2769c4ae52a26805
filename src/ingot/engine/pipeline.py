"""The pipeline of a plan: one thread reads, several encode, and the calling thread writes, with one memory budget.

Chunks keep their order, so the output depends neither on the number of threads nor on the chunk sizes. A ``Budget``
limits the memory: a chunk's cost is acquired before it is read and released after it is written. Events pass between
threads in batches, because waking a thread takes longer than processing a small chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from queue import Empty, Full, Queue
from typing import Any, Protocol

from ingot.core.numeric.buffers import recycling
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.numeric.stats import ErrorStats
from ingot.core.runtime.parallel import CancelToken, Workers, inherit_token
from ingot.engine.frames import PartEncoder, part_encoder
from ingot.engine.hashing import HashFactories
from ingot.engine.work import ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.model.bytesource import Buffer
from ingot.model.spec import TensorSpec


class TensorWriter(Protocol):
    """The methods of a ``FormatWriter`` that write tensors."""

    def begin(self, spec: TensorSpec) -> None: ...

    def write(self, role: str, data: Buffer) -> None: ...

    def end(self) -> dict[str, Any]: ...


class TensorSink:
    """A sink that passes one tensor's bytes to a writer, compressed if the spec requires it.

    Parameters
    ----------
    writer : TensorWriter
        The constructor calls ``begin``; ``close`` calls ``end``.
    spec : TensorSpec
    compress : bool
        Whether to compress the bytes as the spec states; False for parts that are copied unchanged.
    pool : Executor
        The threads that compress.
    pending : int
        The largest number of frames that are being compressed or wait to be written.
    """

    def __init__(self, writer: TensorWriter, spec: TensorSpec, *, compress: bool, pool: Executor, pending: int) -> None:
        self._writer = writer
        self._pool = pool
        self._limit = pending
        self._frames: deque[tuple[str, Future[bytes]]] = deque()
        self._encoders: dict[str, PartEncoder] = {
            part.role: part_encoder(spec, part) for part in spec.parts if compress and part.encoding != "raw"
        }
        self._buffers = {role: bytearray() for role in self._encoders}
        writer.begin(spec)

    def write(self, parts: Mapping[str, Any]) -> None:
        """Write the next bytes of each part."""
        for role, array in parts.items():
            data = array if isinstance(array, memoryview) else file_bytes(array)
            if role in self._encoders:
                self._cut(role, data)
            elif data.nbytes:
                self._writer.write(role, data)

    def close(self) -> dict[str, Any]:
        """Write the remaining bytes and end the tensor; return the writer's record of the tensor."""
        for role, buffered in self._buffers.items():
            if buffered:
                self._submit(role, bytes(buffered))
        self._drain(0)
        for role, encoder in self._encoders.items():
            index = encoder.index()
            if index:
                self._writer.write(role, index)
        return self._writer.end()

    def _cut(self, role: str, data: memoryview) -> None:
        buffered = self._buffers[role]
        size = self._encoders[role].content
        position = 0
        while len(buffered) + data.nbytes - position >= size:
            stop = position + size - len(buffered)
            self._submit(role, bytes(buffered) + bytes(data[position:stop]) if buffered else bytes(data[position:stop]))
            buffered.clear()
            position = stop
        buffered += data[position:]

    def _submit(self, role: str, content: bytes) -> None:
        self._drain(self._limit - 1)
        self._frames.append((role, self._pool.submit(self._encoders[role].encode(content))))

    def _drain(self, max_frames: int) -> None:
        while len(self._frames) > max_frames:
            role, frame = self._frames.popleft()
            self._writer.write(role, self._encoders[role].add(frame.result()))


HashSelector = Callable[[Step], HashFactories]

# A batch is complete when its chunks need this many bytes of the budget, or when it has this many events.
_BATCH_BYTES = 1 << 18
_BATCH_EVENTS = 192


def hash_nothing(step: Step) -> HashFactories:
    """Return an empty mapping: the hash selector of a run that hashes no values."""
    return {}


class Budget:
    """The number of bytes of chunks in flight, with a limit. One thread acquires bytes, any thread releases them.

    A single chunk may exceed the limit if no other chunk is in flight.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()
        self._stopped = False

    def take_now(self, amount: int) -> bool:
        """Acquire ``amount`` bytes if this is possible without waiting; return whether they were acquired."""
        with self._changed:
            fits = self._used == 0 or self._used + amount <= self.limit
            self._used += amount if fits else 0
            return fits and not self._stopped

    def take(self, amount: int) -> bool:
        """Wait until ``amount`` bytes are free and acquire them; return False if the pipeline was stopped."""
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
    """Events that the writing thread receives together, and the encoding tasks of their chunks.

    One thread of the pool runs all tasks of a batch.
    """

    events: list[Event] = field(default_factory=list)
    works: list[ChunkTask] = field(default_factory=list)
    cost: int = 0
    outcomes: Future[list[Outcome]] | None = None

    @property
    def is_full(self) -> bool:
        return self.cost >= _BATCH_BYTES or len(self.events) >= _BATCH_EVENTS

    def drain(self) -> Iterator[Event]:
        """Yield the events and remove each from the batch, so that its memory can be reused."""
        self.events.reverse()
        while self.events:
            yield self.events.pop()

    def chunk(self, work: ChunkTask, in_bytes: int, cost: int) -> None:
        """Add the event of a chunk, which ``work`` encodes."""
        self.events.append(Chunk(self, len(self.works), in_bytes, cost))
        self.works.append(work)
        self.cost += cost

    def submit(self, pool: Workers) -> None:
        """Start the batch's tasks in the pool, as one job."""
        if self.works:
            works = self.works
            self.works = []
            self.outcomes = pool.submit(_outcomes, works)


def _outcomes(works: list[ChunkTask]) -> list[Outcome]:
    """Run all tasks and return the result or the error of each.

    If a task fails, the tasks after it still run, because other threads may wait for them.
    """
    works.reverse()
    return [_outcome(works.pop()) for _ in range(len(works))]  # ``pop`` releases the input of a completed task


def _outcome(work: ChunkTask) -> Outcome:
    try:
        return work()
    except BaseException as error:
        return error


@dataclass(frozen=True, slots=True)
class Chunk:
    """The event of a chunk: ``in_bytes`` were read for it, and it uses ``cost`` bytes of the budget."""

    batch: Batch
    index: int
    in_bytes: int
    cost: int

    def result(self) -> EncodedChunk:
        """Wait for the chunk's task and return its result; raise its error. Can be called once."""
        assert self.batch.outcomes is not None
        outcomes = self.batch.outcomes.result()
        outcome = outcomes[self.index]
        outcomes[self.index] = _ALREADY_RETURNED
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


_ALREADY_RETURNED = RuntimeError("this chunk was taken before")


@dataclass(frozen=True, slots=True)
class Begin:
    """The first event of a step. The spec of the step contains the parameters of fit passes."""

    step: Step
    running: StepRun[Any]


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a step: all its chunks were read, and the digests of the source parts are correct."""

    step: Step
    running: StepRun[Any]


Event = Begin | Chunk | End


class Pipeline:
    """Reads and encodes steps in threads and yields events for the writing thread.

    Parameters
    ----------
    steps : sequence of Step
    chunk_plans : sequence of ChunkPlan
        One chunk plan for each step.
    workers : int
        The number of encoding threads.
    budget : int
        Bytes for chunks in flight.
    measured : bool
        Whether to measure the errors of lossy steps.
    recycled : int
        Bytes of memory to recycle between chunks.
    hash_selector : callable
        Returns the hash factories of a step; called at the beginning of each step, in order.

    Iterate over ``events()`` inside a ``with`` block. The end of the block stops and joins every thread.

    Raises
    ------
    MissingExtraError
        A step needs an optional package that is not installed.
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
        hash_selector: HashSelector = hash_nothing,
    ) -> None:
        for step in steps:
            if step.encoder is not None:
                step.encoder.ready()
        self._steps = steps
        self._chunk_plans = chunk_plans
        self._measured = measured
        self._select_hashes = hash_selector
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
        """Yield ``Begin``, ``Chunk``..., ``End`` for each step in order. Raises errors of the reading thread."""
        while (item := self._get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield from item.drain()

    def release(self, chunk: Chunk) -> None:
        """Release the memory of a chunk after it was written."""
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
        """Pass the current batch to the other threads; return False if the pipeline was stopped."""
        batch = self._batch
        self._batch = Batch()
        try:
            batch.submit(self.pool)
        except RuntimeError:  # the pool is shut down
            if not self._stop.is_set():
                raise
        return not self._stop.is_set() and (not batch.events or self._put(batch))

    def _acquire(self, cost: int) -> bool:
        """Acquire the memory of a chunk; return False if the pipeline was stopped.

        If the memory is not free, the current batch is passed on first, so that its chunks can release memory.
        """
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
        """Add the events of a step to the batch and pass on full batches; return False if the pipeline was stopped."""
        running = step.start(chunk_plan, self._select_hashes(step), measured=self._measured)
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
    """The destination of one tensor's bytes."""

    def write(self, parts: Mapping[str, Any]) -> None:
        """Write the next bytes of each part."""
        ...

    def close(self) -> dict[str, Any]:
        """End the tensor; return the writer's record of the tensor."""
        ...


def write_chunks(
    pipeline: Pipeline,
    opened: Callable[[Begin], Sink],
    finished: Callable[[End, dict[str, Any], ErrorStats], None],
    advance: Callable[[int, str], None],
) -> None:
    """Write the chunks of a pipeline in order.

    ``opened`` returns the sink of the next tensor. ``finished`` receives the ``End`` event of a tensor, the writer's
    record, and the sum of the errors of its chunks. ``advance`` receives the number of bytes read for a chunk and the
    tensor's name. Raises the errors of the pipeline's threads.
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
            pipeline.release(event)
            advance(event.in_bytes, "")
        elif isinstance(event, End):
            assert sink is not None
            finished(event, sink.close(), error)
