"""The pipeline of a plan: one thread reads, several encode, the caller's thread writes, under one memory budget.

Everything is handed on in order, so the output does not depend on the number of threads or on how a tensor is cut
into chunks.
What bounds memory is one ``Budget`` that a chunk's cost is taken from before it is read and given back after it is
written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue

from ingot.core.buffers import recycling
from ingot.core.parallel import Halt, Workers, adopt
from ingot.engine.watch import Watches
from ingot.engine.work import Chunking, Encoded, Running, Step

Watching = Callable[[Step], Watches]


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
    """The first event of a step, whose spec has what was learnt."""

    step: Step
    running: Running


@dataclass(frozen=True, slots=True)
class End:
    """All chunks of the step were read and the digests of its source parts fit."""

    step: Step
    running: Running


Event = Begin | Chunk | End


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
        for step in steps:
            step.ready()
        self._steps, self._chunkings, self._measured, self._watching = steps, chunkings, measured, watching
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
        running = step.begin(shape, self._watching(step), measured=self._measured)
        learnt = running.learn()
        if learnt is not None:
            step = replace(step, spec=replace(step.spec, params=dict(learnt)))
        if not self._put(Begin(step, running)):
            return False
        for work, in_bytes in running.work(lambda: self._budget.take(shape.cost)):
            if self._stop.is_set() or not self._put(Chunk(self.pool.submit(work), in_bytes, shape.cost)):
                return False
        return self._put(End(step, running))
