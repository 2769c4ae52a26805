"""The pipeline of a plan: one thread reads, several encode, the caller's thread writes, under one memory budget.

Everything is handed on in order, so the output does not depend on the number of threads or on how a tensor is cut
into chunks.
What bounds memory is one ``Budget`` that a chunk's cost is taken from before it is read and given back after it is
written. Small tensors are handed from thread to thread many at a time: waking a thread takes longer than they do. Where
all are small, the caller's thread does everything: threads would take turns at Python's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, Full, Queue
from typing import Any

from ingot.core.buffers import recycling
from ingot.core.parallel import Halt, Workers, adopt
from ingot.core.stats import ErrorStats
from ingot.engine.alike import by_kind
from ingot.engine.watch import Watches
from ingot.engine.work import Chunking, Encoded, Running, Step, Take, Work
from ingot.model.ranges import is_distant

Watching = Callable[[Step], Watches]

# A batch is handed on when its chunks take so many bytes of budget, or when it has so many events.
_BATCH_BYTES, _BATCH_EVENTS = 1 << 18, 192
# A chunk of so many bytes of budget is small.
_SMALL = 1 << 14


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


Outcome = Encoded | BaseException


@dataclass(slots=True)
class Batch:
    """Events that are handed on together, and the works of their chunks, which one thread of the pool does in order."""

    events: list[Event] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
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

    def chunk(self, work: Work, in_bytes: int, cost: int) -> None:
        """Add a chunk that ``work`` makes."""
        self.events.append(Chunk(self, len(self.works), in_bytes, cost))
        self.works.append(work)
        self.cost += cost

    def submit(self, pool: Workers | None) -> None:
        """Let the pool do the works, or do them here."""
        if not self.works:
            return
        works, self.works = self.works, []
        if pool is not None:
            self.outcomes = pool.submit(_outcomes, works)
        else:
            self.outcomes = Future()
            self.outcomes.set_result(_outcomes(works))


def _outcomes(works: list[Work]) -> list[Outcome]:
    """Do all, whatever becomes of one: threads may wait for one after it."""
    works.reverse()
    return [_outcome(works.pop()) for _ in range(len(works))]  # what is done holds its input no longer


def _outcome(work: Work) -> Outcome:
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

    def result(self) -> Encoded:
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
    running: Running


@dataclass(frozen=True, slots=True)
class End:
    """All chunks of the step were read and the digests of its source parts fit."""

    step: Step
    running: Running


class _AllRead(Running):
    """A step of which everything was read at once, and nothing noted."""

    def __init__(self) -> None:
        super().__init__(Chunking(0, 1, 1, 0))
        self._notes = super().notes()

    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        return iter(())

    def notes(self) -> dict[str, Any]:
        return self._notes


_ALL_READ = _AllRead()


@dataclass(frozen=True, slots=True)
class Whole:
    """A small step from its beginning to its end: all bytes of its ``parts``. ``cost`` is what they took."""

    step: Step
    parts: Mapping[str, Any]
    cost: int
    running: Running
    error: ErrorStats


Event = Begin | Chunk | End | Whole


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
        chunkings: Sequence[Chunking],
        *,
        workers: int,
        budget: int,
        measured: bool,
        recycled: int = 0,
        watching: Watching = nothing,
    ) -> None:
        for step, _ in by_kind(steps):
            step.ready()
        self._steps, self._chunkings, self._measured, self._watching = steps, chunkings, measured, watching
        self._budget = Budget(budget)
        self._stop = threading.Event()
        self._recycling = recycling(recycled)
        self._queue: Queue[Batch | BaseException | None] = Queue(maxsize=4 * workers + 8)
        self._batch = Batch()
        self.pool = Workers(workers, "ingot-encode")
        self._halt = Halt()
        small = all(shape.cost <= _SMALL for shape in chunkings) and all(_is_here(step) for step, _ in by_kind(steps))
        self._alone = budget >= 4 * _BATCH_BYTES and small
        self._reader = threading.Thread(target=self._read, name="ingot-read", daemon=True)

    def __enter__(self) -> Pipeline:
        self._recycling.__enter__()
        if not self._alone:
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._halt.set()
        self._budget.stop()
        self.pool.shutdown(wait=True, cancel_futures=True)
        if not self._alone:
            self._reader.join()
        self._recycling.__exit__(None, None, None)

    def events(self) -> Iterator[Event]:
        """Yield ``Begin``, ``Chunk``..., ``End`` for each step in order; raise what went wrong while reading."""
        if self._alone:
            yield from self._events_here()
            return
        while (item := self._get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield from item.taken()

    def done(self, chunk: Chunk | Whole) -> None:
        """Give the memory of what is written back."""
        if not self._alone:
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
        batch, self._batch = self._batch, Batch()
        try:
            batch.submit(self.pool)
        except RuntimeError:  # the pool takes no more work
            if not self._stop.is_set():
                raise
        return not self._stop.is_set() and (not batch.events or self._put(batch))

    def _take(self, cost: int) -> bool:
        """Take a chunk's memory; what would have to be written before there is room is handed on."""
        return self._budget.take_now(cost) or (self._flush() and self._budget.take(cost))

    def _read(self) -> None:
        adopt(self._halt)
        try:
            for step, shape in zip(self._steps, self._chunkings, strict=True):
                if not self._read_step(step, shape):
                    return
            if self._flush():
                self._put(None)
        except BaseException as error:
            if self._flush():
                self._put(error)

    def _read_step(self, step: Step, shape: Chunking) -> bool:
        return all(self._flush() for _ in self._fill(step, shape, lambda: self._take(shape.cost)))

    def _fill(self, step: Step, shape: Chunking, take: Take) -> Iterator[None]:
        """Add the events of a step to the batch; yield each time that it is full, to have it handed on."""
        watches = self._watching(step)
        if shape.cost <= _SMALL and shape.chunk_rows >= shape.rows and step.repeats:
            if not take():
                return
            made = step.at_once(shape, watches, measured=self._measured)
            if made is not None:
                self._batch.events.append(Whole(step, made.parts, shape.cost, made.running or _ALL_READ, made.error))
                self._batch.cost += shape.cost
                if self._batch.is_full:
                    yield
                return
            take = _taken(take)
        running = step.begin(shape, watches, measured=self._measured)
        learnt = running.learn()
        if learnt is not None:
            step = replace(step, spec=replace(step.spec, params=dict(learnt)))
        self._batch.events.append(Begin(step, running))
        for work, in_bytes in running.work(take):
            self._batch.chunk(work, in_bytes, shape.cost)
            if self._batch.is_full:
                yield
        self._batch.events.append(End(step, running))
        if self._batch.is_full:
            yield

    def _events_here(self) -> Iterator[Event]:
        """As ``events``, all in this thread: one batch after the other is read, done and written."""
        try:
            for step, shape in zip(self._steps, self._chunkings, strict=True):
                for _ in self._fill(step, shape, _always):
                    yield from self._done_here()
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._done_here()
            raise
        yield from self._done_here()

    def _done_here(self) -> Iterator[Event]:
        batch, self._batch = self._batch, Batch()
        batch.submit(None)
        return batch.taken()


def _always() -> bool:
    return True


def _taken(take: Take) -> Take:
    """Return what takes memory for all chunks but the first, whose is taken."""
    first = [True]
    return lambda: first.pop() if first else take()


def _is_here(step: Step) -> bool:
    """Whether a step waits for no other machine."""
    return not any(is_distant(part.source) for part in step.tensor.parts.values())
