"""Hashing the values of many tensors while a plan runs: content digests, and the parent hash of others."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from ingot.core.bytes.checksums import Blake3, Hasher, Sha256, hex_of
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.runtime.parallel import Workers
from ingot.model.bytesource import Buffer
from ingot.model.tensor import Array

BASE, RESULT = 0, 1
"""Points at which values pass in a step of two tensors: those of the first, and what is made of both."""


_LITTLE = 1 << 14
_DONE: Future[None] = Future()
_DONE.set_result(None)


class Lane:
    """One thread that hashes what passes, in the order in which it was given; a context manager.

    A little is hashed by who gives it, where nothing waits: waking a thread takes longer.
    """

    def __init__(self, name: str) -> None:
        self._pool = Workers(1, f"ingot-{name}")
        self._last = _DONE
        self._submitting = threading.Lock()  # several threads feed: the last future is that of what waits last

    def feed(self, running: Hasher, data: Buffer) -> Future[None]:
        """Hash ``data`` when its turn comes; it may not change until the returned future is done."""
        if memoryview(data).nbytes <= _LITTLE and self._last.done():
            running.update(data)
            return _DONE
        with self._submitting:
            self._last = last = self._pool.submit(running.update, data)
        return last

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Feed:
    """The hash that one tensor's values go into, chunk after chunk in order; ``own`` if nothing else does."""

    def __init__(self, lane: Lane, running: Hasher, *, own: bool = True) -> None:
        self._lane = lane
        self._running = running
        self.own = own

    def take(self, rows: Array) -> Future[None]:
        """Hash the next rows on the lane; they may not change until the future is done."""
        return self._lane.feed(self._running, file_bytes(rows))

    @property
    def hex(self) -> str:
        """The digest; all futures must be done."""
        return hex_of(self._running)


class Watch(Protocol):
    """Makes the feed of each tensor, in the order in which they are read."""

    def tensor(self, name: str) -> Feed: ...


Watches = Mapping[int, Watch]
"""What is hashed of a step, by the point at which it passes."""


class ContentWatch:
    """A BLAKE3 for every tensor, as content ids need it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def tensor(self, name: str) -> Feed:
        return Feed(self._lane, Blake3())


class ParentWatch:
    """One SHA-256 over each tensor's name and bytes: the ``parent_hash`` of a ``.wdelta``, tensors sorted by name."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._running = Sha256()

    def tensor(self, name: str) -> Feed:
        self._lane.feed(self._running, name.encode("utf-8", "surrogatepass"))
        return Feed(self._lane, self._running, own=False)

    @property
    def hex(self) -> str:
        """The hash of all that passed."""
        return hex_of(self._running)
