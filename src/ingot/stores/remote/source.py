"""A remote file as a ``ByteSource``."""

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
from ingot.stores.remote.cache import name_of, range_cache
from ingot.stores.remote.client import Opened, RangeClient, same_version
from ingot.stores.remote.failures import changed
from ingot.stores.remote.prefetch import Prefetcher
from ingot.stores.remote.sealed_reader import SealedReader
from ingot.stores.remote.transfer import transfer

HEAD = 1 << 16
"""Number of bytes that are read by the request that opens a file."""

GAP = 1 << 14
"""The largest gap between two ranges that one request reads, in bytes."""


class RemoteSource(StampedSource, RangedSource):
    """A remote file at one version; its first bytes, read at opening, stay in memory.

    A copy (``copy``, ``pickle``) reopens the file by its address, and raises ``store.changed`` if its version differs.
    Reading is thread-safe.

    Parameters
    ----------
    client : RangeClient
    key : str
    opened : Opened
    name : str
        The file's name in messages.
    reopen : callable
        A function that reopens the file, for copies.
    seal : callable, optional
        A function that returns the file's seal or None. It is called before the first read after the head.
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
        reopen: Callable[[], ByteSource] | None = None,
        seal: Callable[[], Seal | None] = lambda: None,
    ) -> None:
        self._client: RangeClient | None = client
        self._key = key
        self._head = memoryview(opened.head)
        self._reopen = reopen
        self.name = name
        self.stamp = opened.stamp
        self.size = opened.stamp.size
        self._seal = seal
        self._lock = threading.Lock()
        self._proven: SealedReader | None = None
        self._seal_loaded = False
        self._fetched: set[str] = set()
        self._ahead = Prefetcher(self._read, self.gap)

    def expect(self, ranges: Sequence[Range]) -> None:
        """Start to prefetch ``ranges``; the caller must request each once."""
        self._ahead.expect(ranges)

    def view(self, offset: int, length: int) -> memoryview:
        """Return a buffer with ``length`` bytes at ``offset``; raise the errors of ``readinto``."""
        require_inside(offset, length, self.size, self.name)
        prefetched = self._ahead.take(offset, length)
        if prefetched is not None:
            return prefetched
        out = self._buffer(length)
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``; several requests run at once if it is large.

        Raises ``IntegrityError`` ``store.short-read``, ``store.changed``; ``UsageError`` ``store.closed``; and the
        errors of ``RangeClient.fetch``.
        """
        data = flat(out)
        prefetched = self._ahead.take(offset, data.nbytes)
        if prefetched is None:
            self._read([(offset, data)])
        else:
            data[:] = prefetched

    def ranges(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of each range; ranges with small gaps share a request.

        Raises the errors of ``readinto``.
        """
        for offset, length in ranges:
            require_inside(offset, length, self.size, self.name)
        joined = [(start, self._buffer(length)) for start, length in coalesce(ranges, self.gap)]
        self._read(joined)
        return slice_ranges(ranges, dict(joined))

    def changed(self) -> bool:
        """Return whether the file has another version now, according to the server's headers."""
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
        """Close the file; a second call does nothing."""
        self._ahead.stop()
        self._client = None
        self._head = memoryview(b"")

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
            head_bytes = max(0, min(len(head) - start, out.nbytes))
            if head_bytes:
                out[:head_bytes] = head[start : start + head_bytes]
            if head_bytes < out.nbytes:
                missing.append((start + head_bytes, out[head_bytes:]))
        transfer(partial(self._fetch, client), missing, self.name)

    def _sealed(self, client: RangeClient) -> SealedReader | None:
        """Return the reader that compares bytes with the file's seal, or None if the file has no seal.

        The seal is loaded once.
        """
        with self._lock:
            if not self._seal_loaded:
                seal = self._seal()
                if seal is not None:
                    seal.require_size(self.size, self.name)
                    self._proven = SealedReader(seal, partial(self._fetch, client), self.name)
                    self._proven.check_head(self._head)
                self._seal_loaded = True
        return self._proven

    def _fetch(self, client: RangeClient, start: int, out: memoryview) -> None:
        """Fill ``out`` from the cache if a strong ETag proves the version, else from the server."""
        named = client.immutable or self.stamp.is_strong
        cache = range_cache() if named and out.nbytes else None
        version = Stamp(self.size) if client.immutable else self.stamp
        name = "" if cache is None else name_of(f"{client.location}/{self._key}", version, start, out.nbytes)
        is_retry = name in self._fetched  # the bytes were wrong: do not read them from the cache again
        self._fetched.add(name)
        if cache is not None and not is_retry and cache.get(name, out):
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
        if self._client is None or self._reopen is None:
            raise UsageError("a file that was closed cannot be copied", rule="store.closed", where=self.name)
        return _restore, (self._reopen, self.stamp)


def _restore(reopen: Callable[[], ByteSource], stamp: Stamp) -> ByteSource:
    """Return a copied or unpickled source; raise ``IntegrityError`` ``store.changed`` if the file differs."""
    source = reopen()
    if not isinstance(source, StampedSource) or source.stamp != stamp:
        raise changed(source.name)
    return source
