"""Reading a sealed file from afar: whole chunks, each compared as it comes, asked for once more where it is wrong."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ingot.errors import IntegrityError
from ingot.model.seal import HEAD, Seal
from ingot.stores.remote.transfer import Task, transfer

_HELD = 8  # chunks of which only a part was wanted, for the next read

Fetch = Callable[[int, memoryview], None]


class Proven:
    """The bytes of one sealed file. Thread-safe.

    Parameters
    ----------
    seal : Seal
    fetch : callable
        Fills a buffer from a place of the file.
    name : str
        For messages.
    """

    def __init__(self, seal: Seal, fetch: Fetch, name: str) -> None:
        self._seal = seal
        self._fetch = fetch
        self._name = name
        self._lock = threading.Lock()
        self._held: OrderedDict[int, memoryview] = OrderedDict()

    def check_head(self, head: memoryview) -> None:
        """Compare what came before the seal."""
        if len(head) >= min(HEAD, self._seal.size):
            self._seal.check_head(head, self._name)

    def read(self, tasks: Sequence[Task]) -> None:
        """Fill the buffers; raises ``IntegrityError`` ``seal.digest-mismatch``, and what fetching does."""
        size = self._seal.chunks.size
        wanted: list[Task] = []
        edges: dict[int, memoryview] = {}
        copies: list[tuple[int, int, memoryview]] = []
        for start, out in tasks:
            first = -(-start // size)
            last = (start + out.nbytes) // size
            if start + out.nbytes == self._seal.size:
                last = -(-self._seal.size // size)
            if first < last:
                whole = min(last * size, self._seal.size) - first * size
                wanted.append((first * size, out[first * size - start :][:whole]))
            stop = start + out.nbytes
            for index in range(start // size, -(-stop // size)):
                if not first <= index < last:
                    edges.setdefault(index, self._edge(index))
                    copies.append((index, start, out))
        new = {index: buffer for index, buffer in edges.items() if index not in self._held}
        transfer(self._checked, [*wanted, *((index * size, buffer) for index, buffer in new.items())], self._name)
        for index, start, out in copies:
            begin = max(start, index * size)
            stop = min(start + out.nbytes, (index + 1) * size)
            out[begin - start : stop - start] = edges[index][begin - index * size : stop - index * size]
        with self._lock:
            self._held.update(new)
            while len(self._held) > _HELD:
                self._held.popitem(last=False)

    def _edge(self, index: int) -> memoryview:
        with self._lock:
            held = self._held.get(index)
        return np.empty(self._seal.chunks.span(index)[1], np.uint8).data if held is None else held

    def _checked(self, start: int, out: memoryview) -> None:
        """Read whole chunks and compare them."""
        size = self._seal.chunks.size
        self._fetch(start, out)
        for at in range(0, out.nbytes, size):
            index = (start + at) // size
            piece = out[at : at + size]
            try:
                self._seal.check(index, piece, self._name)
            except IntegrityError:
                self._fetch(start + at, piece)
                self._seal.check(index, piece, self._name)
