"""What the pipeline's threads hand each other, and the contract of a step that works by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.core.stats import ErrorStats

# Large enough to hide a thread's wake-up, small enough that a few fit in the second-level cache's reach.
SLAB_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a worker made of one slab. ``settle`` is called by the thread that writes, slab after slab in order."""

    parts: Mapping[str, Any]
    error: ErrorStats | None = None
    settle: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step's tensor is cut: ``rows`` of ``cols`` elements, ``slab_rows`` at a time; bytes of budget per slab."""

    rows: int
    cols: int
    slab_rows: int
    cost: int


Work = Callable[[], Encoded]
Take = Callable[[], bool]


class Job(Protocol):
    """A step that reads more than one tensor, or hashes what passes: it cuts and reads by itself."""

    def cut(self, budget: int, slots: int) -> Cut:
        """Choose a slab so that ``slots`` of them fit in ``budget`` bytes, as far as that can be."""
        ...

    def learn(self, shape: Cut) -> Mapping[str, Any] | None:
        """Make the passes that come before encoding; return the parameters that they complete."""
        ...

    def work(self, shape: Cut, take: Take) -> Iterator[tuple[Work, int]]:
        """Read slab after slab in the thread that calls; yield each one's work and the bytes read for it.

        ``take`` waits for a slab's memory; False means to stop.
        """
        ...


class Turns:
    """Lets the slabs of one tensor, worked on by several threads, pass one point in order.

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
            raise RuntimeError("an earlier slab of this tensor failed")
