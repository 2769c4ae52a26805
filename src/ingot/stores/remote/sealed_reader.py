"""Read remote files that have a seal: full chunks are read, and a chunk with a wrong digest is requested again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ingot.errors import IntegrityError
from ingot.model.seal import HEAD, Seal
from ingot.stores.remote.transfer import Task, transfer

_MAX_CACHED_CHUNKS = 8  # chunks of which only some bytes were requested

Fetch = Callable[[int, memoryview], None]


class SealedReader:
    """A thread-safe reader that checks the bytes of one file against its seal.

    Parameters
    ----------
    seal : Seal
    fetch : callable
        A function that fills a buffer from an offset of the file.
    name : str
        The file's name in messages.
    """

    def __init__(self, seal: Seal, fetch: Fetch, name: str) -> None:
        self._seal = seal
        self._fetch = fetch
        self._name = name
        self._lock = threading.Lock()
        self._cached: OrderedDict[int, memoryview] = OrderedDict()

    def check_head(self, head: memoryview) -> None:
        """Check the first bytes of the file, which were read before the seal."""
        if len(head) >= min(HEAD, self._seal.size):
            self._seal.check_head(head, self._name)

    def read(self, tasks: Sequence[Task]) -> None:
        """Fill the buffers; raise ``IntegrityError`` ``seal.digest-mismatch``, and the errors of ``fetch``."""
        size = self._seal.chunks.size
        full_chunks: list[Task] = []
        edges: dict[int, memoryview] = {}
        copies: list[tuple[int, int, memoryview]] = []
        for start, out in tasks:
            first = -(-start // size)
            last = (start + out.nbytes) // size
            if start + out.nbytes == self._seal.size:
                last = -(-self._seal.size // size)
            if first < last:
                length = min(last * size, self._seal.size) - first * size
                full_chunks.append((first * size, out[first * size - start :][:length]))
            stop = start + out.nbytes
            for index in range(start // size, -(-stop // size)):
                if not first <= index < last:
                    edges.setdefault(index, self._edge(index))
                    copies.append((index, start, out))
        new = {index: buffer for index, buffer in edges.items() if index not in self._cached}
        edge_tasks = ((index * size, buffer) for index, buffer in new.items())
        transfer(self._read_checked, [*full_chunks, *edge_tasks], self._name)
        for index, start, out in copies:
            begin = max(start, index * size)
            stop = min(start + out.nbytes, (index + 1) * size)
            out[begin - start : stop - start] = edges[index][begin - index * size : stop - index * size]
        with self._lock:
            self._cached.update(new)
            while len(self._cached) > _MAX_CACHED_CHUNKS:
                self._cached.popitem(last=False)

    def _edge(self, index: int) -> memoryview:
        with self._lock:
            cached = self._cached.get(index)
        return np.empty(self._seal.chunks.span(index)[1], np.uint8).data if cached is None else cached

    def _read_checked(self, start: int, out: memoryview) -> None:
        """Read full chunks into ``out`` and check their digests."""
        size = self._seal.chunks.size
        self._fetch(start, out)
        for offset in range(0, out.nbytes, size):
            index = (start + offset) // size
            chunk = out[offset : offset + size]
            try:
                self._seal.check(index, chunk, self._name)
            except IntegrityError:
                self._fetch(start + offset, chunk)
                self._seal.check(index, chunk, self._name)
