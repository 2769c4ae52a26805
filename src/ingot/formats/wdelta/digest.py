"""The SHA-256 at the end of a ``.wdelta``, which covers the file: verified in one pass, computed while a file grows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future

from ingot.core.runtime.parallel import Workers, check_cancelled
from ingot.errors import FormatError, IntegrityError
from ingot.formats.wdelta.layout import DIGEST, PREFIX
from ingot.model.bytesource import ByteSource, Sink

_CHUNK = 1 << 20
# Fewer new bytes than this do not justify waking a thread.
_MIN_STEP = 4 << 20


def check_digest(source: ByteSource, progress: Callable[[int], None] | None = None) -> None:
    """Read the complete file and compare its SHA-256 with the last 32 bytes.

    Parameters
    ----------
    source : ByteSource
    progress : callable, optional
        Called with the number of bytes after every chunk.

    Raises
    ------
    IntegrityError
        ``wdelta.digest-mismatch``: a byte changed, or the file was truncated.
    """
    end = source.size - DIGEST
    if end < PREFIX:
        raise FormatError(
            "wdelta.truncated", f"expected at least {PREFIX + DIGEST} bytes, found {source.size}", where=source.name
        )
    running = hashlib.sha256()
    buffer = memoryview(bytearray(0 if source.mapped else min(_CHUNK, end)))
    for start in range(0, end, _CHUNK):
        check_cancelled()
        size = min(_CHUNK, end - start)
        if source.mapped:
            chunk = source.view(start, size)
        else:
            chunk = buffer[:size]
            source.readinto(start, chunk)
        running.update(chunk)
        if progress is not None:
            progress(size)
    expected = bytes(source.view(end, DIGEST))
    if running.digest() != expected:
        raise IntegrityError(
            "wdelta.digest-mismatch",
            f"expected SHA-256 {expected.hex()}, found {running.hexdigest()}: the file is damaged or was cut off",
            where=source.name,
        )


class TrailingDigest:
    """A digest of a file that is being written, computed by a separate thread that reads back completed bytes.

    The parts of a tensor may arrive in turns, so bytes are not written in the order of the file. Reading them back from
    the page cache costs less than the hash and needs no memory for a buffer. A resumed run can also hash existing bytes
    in this way.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self._submitted = 0
        self._pool = Workers(1, "ingot-sha256")
        self._last: Future[None] | None = None

    def advance(self, position: int) -> None:
        """Hash the bytes before ``position``, which are written and must not change."""
        if position - self._submitted >= _MIN_STEP:
            self._submit(position)

    def finish(self, position: int) -> bytes:
        """Return the digest of the first ``position`` bytes."""
        self._submit(position)
        assert self._last is not None
        self._last.result()
        self.close()
        return self._hash.digest()

    def close(self) -> None:
        """Stop the thread that hashes."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, position: int) -> None:
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = self._pool.submit(self._read, self._submitted, position)
        self._submitted = position

    def _read(self, start: int, stop: int) -> None:
        buffer = memoryview(bytearray(min(_CHUNK, stop - start)))
        for position in range(start, stop, _CHUNK):
            check_cancelled()
            chunk = buffer[: min(_CHUNK, stop - position)]
            self._sink.readinto(position, chunk)
            self._hash.update(chunk)
