"""Read calls."""

from __future__ import annotations

from ingot.core.files import system
from ingot.core.files.oserrors import read_error
from ingot.errors import IntegrityError
from ingot.stores.memory import flat

# One read call moves at most 0x7ffff000 bytes on Linux and INT_MAX on macOS; below that, page-aligned.
MAX_CALL = 1 << 30


def read_all(descriptor: int, offset: int, out: memoryview, where: str) -> None:
    """Fill ``out`` from an open file; ``store.read-failed``, and ``store.short-read`` past the end."""
    rest = flat(out)
    while rest.nbytes:
        try:
            count = system.read_at(descriptor, rest[:MAX_CALL], offset)
        except OSError as error:
            raise read_error(error, where) from error
        if count == 0:
            raise IntegrityError(
                "store.short-read",
                f"expected {rest.nbytes} more bytes at {offset}, found the end of the file",
                where=where,
            )
        offset += count
        rest = rest[count:]
