"""What the pipeline's threads hand each other, and the contract of a step that works by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.core.stats import ErrorStats

# Large enough to hide a thread's wake-up, small enough that a few fit in the second-level cache's reach.
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a worker made of one chunk. ``settle`` is called by the thread that writes, chunk after chunk in order."""

    parts: Mapping[str, Any]
    error: ErrorStats | None = None
    settle: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a step's tensor is cut: ``rows`` of ``cols`` elements, ``chunk_rows`` at a time; bytes of budget each."""

    rows: int
    cols: int
    chunk_rows: int
    cost: int


Work = Callable[[], Encoded]
Take = Callable[[], bool]


class Job(Protocol):
    """A step that reads more than one tensor, or hashes what passes: it cuts and reads by itself."""

    def chunking(self, budget: int, slots: int) -> Chunking:
        """Choose a chunk so that ``slots`` of them fit in ``budget`` bytes, as far as that can be."""
        ...

    def learn(self, shape: Chunking) -> Mapping[str, Any] | None:
        """Make the passes that come before encoding; return the parameters that they complete."""
        ...

    def work(self, shape: Chunking, take: Take) -> Iterator[tuple[Work, int]]:
        """Read chunk after chunk in the thread that calls; yield each one's work and the bytes read for it.

        ``take`` waits for a chunk's memory; False means to stop.
        """
        ...


class Sequencer:
    """Lets the chunks of one tensor, worked on by several threads, pass one point in order.

    A pool begins its work in order, so whoever waits knows the one before it running or done.
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
