"""Hashing of tensors while a plan runs: digests for content ids, and the hash of ``.wdelta`` files."""

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
"""Points of a step at which values are hashed: the values of the base, and the values of the result."""


_SMALL = 1 << 14
_DONE: Future[None] = Future()
_DONE.set_result(None)


class HashThread:
    """A thread that hashes data in the order of the calls of ``submit``; a context manager.

    If no data is pending, the calling thread hashes small data itself, because waking another thread takes longer.
    """

    def __init__(self, name: str) -> None:
        self._pool = Workers(1, f"ingot-{name}")
        self._last = _DONE
        self._submitting = threading.Lock()  # several threads submit; ``_last`` must be the last one in the queue

    def submit(self, running: Hasher, data: Buffer) -> Future[None]:
        """Add ``data`` to the hash ``running``, after all data of earlier calls.

        ``data`` must not change until the returned future is done.
        """
        if memoryview(data).nbytes <= _SMALL and self._last.done():
            running.update(data)
            return _DONE
        with self._submitting:
            self._last = last = self._pool.submit(running.update, data)
        return last

    def __enter__(self) -> HashThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class HashStream:
    """The hash of one tensor's values, to which rows are added in order.

    ``is_separate`` is false if other tensors are added to the same hash.
    """

    def __init__(self, thread: HashThread, running: Hasher, *, is_separate: bool = True) -> None:
        self._thread = thread
        self._running = running
        self.is_separate = is_separate

    def update(self, rows: Array) -> Future[None]:
        """Add the next rows on the thread. They must not change until the future is done."""
        return self._thread.submit(self._running, file_bytes(rows))

    @property
    def hex(self) -> str:
        """The digest in hexadecimal digits; all futures must be done."""
        return hex_of(self._running)


class HashFactory(Protocol):
    """Creates the hash stream of each tensor, in the order in which tensors are read."""

    def stream(self, name: str) -> HashStream: ...


HashFactories = Mapping[int, HashFactory]
"""The factories of a step by the points at which its values are hashed."""


class TensorHashes:
    """A factory that creates a separate BLAKE3 stream for each tensor; content ids are computed from their digests."""

    def __init__(self, thread: HashThread) -> None:
        self._thread = thread

    def stream(self, name: str) -> HashStream:
        return HashStream(self._thread, Blake3())


class ParentHash:
    """A factory whose streams all add to one SHA-256: the ``parent_hash`` of a ``.wdelta``.

    The hash covers the name and the bytes of each tensor, in the order of the calls of ``stream``.
    """

    def __init__(self, thread: HashThread) -> None:
        self._thread = thread
        self._running = Sha256()

    def stream(self, name: str) -> HashStream:
        self._thread.submit(self._running, name.encode("utf-8", "surrogatepass"))
        return HashStream(self._thread, self._running, is_separate=False)

    @property
    def hex(self) -> str:
        """The digest of all tensors in hexadecimal digits."""
        return hex_of(self._running)
