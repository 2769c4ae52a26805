"""Bytes in an unnamed temporary file on the target's disk, until their offset in the artifact is known."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from ingot.core.files.system import write_error
from ingot.model.bytesource import DiskSink, Sink

_CHUNK = 1 << 20


class Spool:
    """A temporary file to which bytes are appended before it is read once from the start.

    The file has no name, so it disappears when the process ends. It is created in the folder of ``sink``, which must
    have room for the artifact anyway; the system's temporary folder is often in memory.
    """

    def __init__(self, sink: Sink) -> None:
        self._location = f"temporary file in the folder of {getattr(sink, 'name', 'the target')}"
        try:
            self._file = sink.scratch() if isinstance(sink, DiskSink) else tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise write_error(error, self._location) from error

    def write(self, data: memoryview) -> None:
        """Append ``data`` to the file."""
        try:
            self._file.write(data)
        except OSError as error:
            raise write_error(error, self._location) from error

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes of the file in chunks, from its start."""
        try:
            self._file.seek(0)
            while chunk := self._file.read(_CHUNK):
                yield chunk
        except OSError as error:
            raise write_error(error, self._location) from error

    def close(self) -> None:
        """Close the file, which releases its disk space."""
        self._file.close()
