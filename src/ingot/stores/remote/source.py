"""A file of another machine as a ``ByteSource``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import require_inside
from ingot.errors import ResourceError, UsageError
from ingot.model.bytesource import ByteSource, Range, RangedSource, Stamp, StampedSource
from ingot.model.reading.ranges import coalesce, slice_ranges
from ingot.model.seal import Seal
from ingot.stores.files import flat
from ingot.stores.remote.ahead import Ahead
from ingot.stores.remote.cache import name_of, range_cache
from ingot.stores.remote.client import Opened, RangeClient, same_version
from ingot.stores.remote.failures import changed
from ingot.stores.remote.proof import Proven
from ingot.stores.remote.transfer import transfer

HEAD = 1 << 16
"""Bytes that come with the opening of a file."""

GAP = 1 << 14
"""Bytes between two ranges that are sooner read than asked for by another request."""


class RemoteSource(StampedSource, RangedSource):
    """One version of one file, read by ranges; what came with its opening is held and not asked for again.

    A copy (``copy``, ``pickle``) opens the file again by its address, and is refused with ``store.changed`` where that
    is another version now. Reading is thread-safe.

    Parameters
    ----------
    client : RangeClient
    key : str
    opened : Opened
    name : str
        For messages.
    again : callable
        Opens the file anew: what a copy calls.
    seal : callable, optional
        Returns the seal that lies beside the file, or None; called before the first read behind the head.
    """

    io = "remote"
    mapped = False
    gap = GAP

    def __init__(
        self,
        client: RangeClient,
        key: str,
        opened: Opened,
        name: str,
        again: Callable[[], ByteSource] | None = None,
        seal: Callable[[], Seal | None] = lambda: None,
    ) -> None:
        self._client: RangeClient | None = client
        self._key = key
        self._head = memoryview(opened.head)
        self._again = again
        self.name = name
        self.stamp = opened.stamp
        self.size = opened.stamp.size
        self._seal = seal
        self._lock = threading.Lock()
        self._proven: Proven | None = None
        self._asked = False
        self._taken: set[str] = set()
        self._ahead = Ahead(self._read, self.gap)

    def expect(self, ranges: Sequence[Range]) -> None:
        """Begin to read what will be asked for; see ``RangedSource.expect``."""
        self._ahead.expect(ranges)

    def view(self, offset: int, length: int) -> memoryview:
        """Return a fresh buffer with ``length`` bytes at ``offset``; errors as ``readinto``."""
        require_inside(offset, length, self.size, self.name)
        there = self._ahead.take(offset, length)
        if there is not None:
            return there
        out = self._buffer(length)
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``, by several requests at a time where it is large.

        Raises ``IntegrityError`` ``store.short-read``, ``store.changed``; ``UsageError`` ``store.closed``; and as
        ``RangeClient.fetch``.
        """
        data = flat(out)
        there = self._ahead.take(offset, data.nbytes)
        if there is None:
            self._read([(offset, data)])
        else:
            data[:] = there

    def ranges(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of each range; those close to each other by one request. Errors as ``readinto``."""
        for offset, length in ranges:
            require_inside(offset, length, self.size, self.name)
        joined = [(start, self._buffer(length)) for start, length in coalesce(ranges, self.gap)]
        self._read(joined)
        return slice_ranges(ranges, dict(joined))

    def changed(self) -> bool:
        """Whether the file is another version now, as far as its server tells."""
        if self._client is None or self._client.immutable:
            return False
        try:
            now = self._client.state(self._key)
        except UsageError as error:
            if error.rule == "store.missing":
                return True
            raise
        return not same_version(now, self.stamp)

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        self._ahead.stop()
        self._client, self._head = None, memoryview(b"")

    def _read(self, tasks: Sequence[tuple[int, memoryview]]) -> None:
        client = self._client
        head = self._head
        missing = []
        if client is None:
            raise UsageError("this file was closed", rule="store.closed", where=self.name)
        if any(start + out.nbytes > len(head) for start, out in tasks):
            proven = self._sealed(client)
            if proven is not None:
                for start, out in tasks:
                    require_inside(start, out.nbytes, self.size, self.name)
                proven.read(tasks)
                return
        for start, out in tasks:
            require_inside(start, out.nbytes, self.size, self.name)
            held = max(0, min(len(head) - start, out.nbytes))
            if held:
                out[:held] = head[start : start + held]
            if held < out.nbytes:
                missing.append((start + held, out[held:]))
        transfer(partial(self._fetch, client), missing, self.name)

    def _sealed(self, client: RangeClient) -> Proven | None:
        """Return by what bytes are proven, asked for once; None of a file without a seal."""
        with self._lock:
            if not self._asked:
                seal = self._seal()
                if seal is not None:
                    seal.require_size(self.size, self.name)
                    self._proven = Proven(seal, partial(self._fetch, client), self.name)
                    self._proven.check_head(self._head)
                self._asked = True
        return self._proven

    def _fetch(self, client: RangeClient, start: int, out: memoryview) -> None:
        """Fill ``out``: from the cache if there is one and a strong tag proves the version, else from the server."""
        named = client.immutable or self.stamp.is_strong
        cache = range_cache() if named and out.nbytes else None
        version = Stamp(self.size) if client.immutable else self.stamp
        name = "" if cache is None else name_of(f"{client.location}/{self._key}", version, start, out.nbytes)
        again = name in self._taken  # what was wrong when it came is asked for once more, of its server
        self._taken.add(name)
        if cache is not None and not again and cache.get(name, out):
            return
        client.fetch(self._key, start, out, self.stamp)
        if cache is not None:
            cache.put(name, out)

    def _buffer(self, length: int) -> memoryview:
        try:
            return np.empty(length, np.uint8).data
        except MemoryError as error:
            raise ResourceError(f"no memory for {length} bytes", rule="store.no-memory", where=self.name) from error

    def __reduce__(self) -> tuple[Any, ...]:
        if self._client is None or self._again is None:
            raise UsageError("a file that was closed cannot be copied", rule="store.closed", where=self.name)
        return _copied, (self._again, self.stamp)


def _copied(again: Callable[[], ByteSource], stamp: Stamp) -> ByteSource:
    """Open a source again in another place or process."""
    source = again()
    if not isinstance(source, StampedSource) or source.stamp != stamp:
        raise changed(source.name)
    return source
