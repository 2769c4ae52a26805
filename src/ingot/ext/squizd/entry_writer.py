"""Writer of a matrix's scale entries as its scales and zero points arrive, without buffering them."""

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
"""The field of an entry for each role of a part."""

Array = np.ndarray[Any, np.dtype[Any]]

_CRC = "crc32c"
_CHUNK = 1 << 14
# For 16-bit floats: the bits of infinity, and the bit that is clear in a signalling NaN.
_NAN_BITS = {"f16": (0x7C00, 0x0200), "bf16": (0x7F80, 0x0040)}


class EntryWriter:
    """A writer of entries at ``offset`` of a sink: the values of each role in order, the roles in any order.

    Values of f32, f16 or bf16 (``dtype``) widen to f32 exactly. Entries are written with the first role that reaches
    them and read back for the other role, so that nothing is buffered in memory.
    """

    def __init__(self, sink: Sink, offset: int, id: int, dtype: str, location: str) -> None:
        self._sink, self._offset, self._id, self._dtype, self._location = sink, offset, id, dtype, location
        self._done = dict.fromkeys(FIELD, 0)
        self._incomplete = dict.fromkeys(FIELD, b"")

    def write(self, role: str, data: memoryview) -> None:
        """Append a role's next bytes, which may split a value.

        Raises ``UnsupportedError`` ``squizd.carry`` for a signalling NaN.
        """
        step, item = _CHUNK * numpy_dtype(self._dtype).itemsize, numpy_dtype(self._dtype).itemsize
        for start in range(0, data.nbytes, step):
            chunk = self._incomplete[role] + bytes(data[start : start + step])
            complete = len(chunk) // item * item
            self._incomplete[role] = chunk[complete:]
            self._fill(role, from_file(np.frombuffer(chunk, np.uint8, complete), self._dtype))

    def blob(self) -> tuple[int, int, str]:
        """Return the offset of the entries, their bytes, and their CRC-32C."""
        running, count = checksums.hasher(_CRC), max(self._done.values())
        for start in range(0, count, _CHUNK):
            running.update(self._read(start, min(_CHUNK, count - start)).tobytes())
        return self._offset, count * SCALE_ENTRY, running.text()

    def _fill(self, role: str, values: Array) -> None:
        self._require_exact(values)
        start, written = self._done[role], max(self._done.values())
        entries = self._read(start, min(written - start, values.size))
        fresh = np.zeros(values.size, ENTRY)
        fresh["id"] = self._id
        fresh[: entries.size] = entries
        fresh[FIELD[role]] = values
        self._sink.write_at(self._offset + start * SCALE_ENTRY, fresh.tobytes())
        self._done[role] = start + values.size

    def _read(self, start: int, count: int) -> Array:
        """Return entries that were already written."""
        entries = np.empty(count, ENTRY)
        if count:
            self._sink.readinto(self._offset + start * SCALE_ENTRY, entries.view(np.uint8).data)
        return entries

    def _require_exact(self, values: Array) -> None:
        """Raise an error for 16-bit values that f32 entries cannot restore: widening makes a signalling NaN quiet."""
        infinity, quiet = _NAN_BITS.get(self._dtype, (0, 0))
        if not infinity:
            return
        magnitudes = values.view(np.uint16) & 0x7FFF
        if ((magnitudes > infinity) & (magnitudes & quiet == 0)).any():
            raise UnsupportedError(
                f"{self._location!r}: expected scales without a signalling NaN, which entries cannot store; quantize "
                "this tensor again",
                rule="squizd.carry",
            )
