"""Writing the scale entries of one matrix as its scales and zero points come, without keeping them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.errors import UnsupportedError
from ingot.ext.squizd.layout import SCALE_ENTRY
from ingot.ext.squizd.scales import ENTRY
from ingot.model.bytesource import Sink

FIELD = {"scales": "scale", "zeros": "zero"}
"""Roles of parts, and the field of an entry that each fills."""

Array = np.ndarray[Any, np.dtype[Any]]

_CRC = "crc32c"
_PIECE = 1 << 14
# Of 16-bit floats: all bits of infinity, and the bit that a signalling NaN lacks.
_NAN_BITS = {"f16": (0x7C00, 0x0200), "bf16": (0x7F80, 0x0040)}


class EntryWriter:
    """Fills entries at ``offset`` of a sink: each role's numbers in order, the roles in any.

    Numbers of f32, f16 or bf16 (``dtype``) widen to f32 exactly. Entries are written with the first role that reaches
    them and read back for the other, so that nothing waits in memory.
    """

    def __init__(self, sink: Sink, offset: int, id: int, dtype: str, where: str) -> None:
        self._sink, self._offset, self._id, self._dtype, self._where = sink, offset, id, dtype, where
        self._done = dict.fromkeys(FIELD, 0)
        self._rest = dict.fromkeys(FIELD, b"")

    def write(self, role: str, data: memoryview) -> None:
        """Take a role's next bytes, cut anywhere.

        Raises ``UnsupportedError`` ``squizd.carry`` for a signalling NaN.
        """
        step, item = _PIECE * numpy_dtype(self._dtype).itemsize, numpy_dtype(self._dtype).itemsize
        for start in range(0, data.nbytes, step):
            piece = self._rest[role] + bytes(data[start : start + step])
            whole = len(piece) // item * item
            self._rest[role] = piece[whole:]
            self._fill(role, from_file(np.frombuffer(piece, np.uint8, whole), self._dtype))

    def blob(self) -> tuple[int, int, str]:
        """Return where the entries lie, their bytes, and the CRC-32C of these."""
        running, count = checksums.hasher(_CRC), max(self._done.values())
        for start in range(0, count, _PIECE):
            running.update(self._read(start, min(_PIECE, count - start)).tobytes())
        return self._offset, count * SCALE_ENTRY, running.text()

    def _fill(self, role: str, values: Array) -> None:
        self._require_exact(values)
        start, there = self._done[role], max(self._done.values())
        entries = self._read(start, min(there - start, values.size))
        fresh = np.zeros(values.size, ENTRY)
        fresh["id"] = self._id
        fresh[: entries.size] = entries
        fresh[FIELD[role]] = values
        self._sink.write_at(self._offset + start * SCALE_ENTRY, fresh.tobytes())
        self._done[role] = start + values.size

    def _read(self, start: int, count: int) -> Array:
        """Return entries that were written."""
        entries = np.empty(count, ENTRY)
        if count:
            self._sink.readinto(self._offset + start * SCALE_ENTRY, entries.view(np.uint8).data)
        return entries

    def _require_exact(self, values: Array) -> None:
        """Refuse 16-bit numbers that f32 entries cannot give back: a signalling NaN turns quiet when it widens."""
        infinity, quiet = _NAN_BITS.get(self._dtype, (0, 0))
        if not infinity:
            return
        magnitudes = values.view(np.uint16) & 0x7FFF
        if ((magnitudes > infinity) & (magnitudes & quiet == 0)).any():
            raise UnsupportedError(
                f"{self._where!r}: scale entries hold no signalling NaN; quantize this tensor again",
                rule="squizd.carry",
            )
