"""Bytes of a large file for the parser of messages, which reads them in windows."""

from __future__ import annotations

from typing import overload

from ingot.model.bytesource import ByteSource

_WINDOW = 1 << 16


class WindowedBytes:
    """The bytes of a source; one window of them is cached."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._size = source, source.size
        self._start, self._cached = 0, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __getitem__(self, index: int | slice, /) -> int | bytes:
        if isinstance(index, int):
            return self[index : index + 1][0]
        start, stop, _ = index.indices(self._size)
        if start >= stop:
            return b""
        if not (self._start <= start and stop <= self._start + len(self._cached)):
            if stop - start > _WINDOW:
                return self._read(start, stop)
            self._start, self._cached = start, self._read(start, min(start + _WINDOW, self._size))
        return self._cached[start - self._start : stop - self._start]

    def _read(self, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        self._source.readinto(start, memoryview(out))
        return bytes(out)
