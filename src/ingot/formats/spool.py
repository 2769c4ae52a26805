"""Bytes that wait in an unnamed temporary file until their place in an artifact is known."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from ingot.core.oserrors import write_error

_CHUNK = 1 << 20


class Spool:
    """Append, then read once from the start. The file is unlinked; it goes with the process."""

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives until close
        except OSError as error:
            raise write_error(error, _where()) from error

    def write(self, data: memoryview) -> None:
        """Append."""
        try:
            self._file.write(data)
        except OSError as error:
            raise write_error(error, _where()) from error

    def chunks(self) -> Iterator[bytes]:
        """Yield everything, in pieces."""
        try:
            self._file.seek(0)
            while chunk := self._file.read(_CHUNK):
                yield chunk
        except OSError as error:
            raise write_error(error, _where()) from error

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


def _where() -> str:
    return f"temporary file in {tempfile.gettempdir()}"
