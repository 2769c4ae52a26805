"""Bytes that wait in an unnamed temporary file, on the target's disk, until their place in an artifact is known."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from ingot.core.files.oserrors import write_error
from ingot.model.bytesource import DiskSink, Sink

_CHUNK = 1 << 20


class Spool:
    """Append, then read once from the start. The file is unlinked; it goes with the process.

    It lies beside ``sink``, where there is room for an artifact, and not in a temporary folder, which is often memory.
    """

    def __init__(self, sink: Sink) -> None:
        self._where = f"temporary file beside {getattr(sink, 'name', 'the target')}"
        try:
            self._file = sink.scratch() if isinstance(sink, DiskSink) else tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise write_error(error, self._where) from error

    def write(self, data: memoryview) -> None:
        """Append."""
        try:
            self._file.write(data)
        except OSError as error:
            raise write_error(error, self._where) from error

    def chunks(self) -> Iterator[bytes]:
        """Yield everything, in pieces."""
        try:
            self._file.seek(0)
            while chunk := self._file.read(_CHUNK):
                yield chunk
        except OSError as error:
            raise write_error(error, self._where) from error

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
