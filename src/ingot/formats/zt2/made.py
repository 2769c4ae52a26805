"""Parts of profiles that are made of what is stored: words whose first code lies in the high bits, zero points that are
packed or integers, exponents for scales. The codecs have streams of bytes, low bits first or high, and floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, file_bytes, from_file, numpy_dtype
from ingot.core.numeric.floats import cast
from ingot.errors import FormatError
from ingot.formats.shared.numbers import ConvertedSource
from ingot.model.part import Part
from ingot.model.tensor import Array

RULE = "zt2.zero-point"


@dataclass(frozen=True, slots=True)
class Made:
    """How a part is made: the role in the file that it is of, its types here, its bytes, and what makes them."""

    stored: str
    dtype: str
    nbytes: int
    make: Callable[[bytes], bytes]
    type: str | None = None

    def part(self, stored: Part) -> Part:
        """Return the part; the stored bytes are checked by their digest when it is made, all at once."""
        source = ConvertedSource(lambda: self._read(stored), self.nbytes, stored.source.name, stored.digest)
        return Part(self.dtype, self.nbytes, source, type=self.type, where=stored.where, occupies=stored.length)

    def _read(self, stored: Part) -> bytes:
        try:
            return self.make(bytes(stored.view()))
        except FormatError as error:
            raise error.at(stored.where) from None


def turned_words(data: bytes, width: int) -> bytes:
    """Return words of ``width`` bytes with their highest byte first."""
    return np.frombuffer(data, np.uint8).reshape(-1, width)[:, ::-1].tobytes()


def turned_codes(data: bytes, width: int, bits: int) -> bytes:
    """Return words whose first code lies in the high bits as a stream whose first code lies in the low ones."""
    stream = np.frombuffer(turned_words(data, width), np.uint8)
    codes = stream[:, None] >> np.arange(8 - bits, -1, -bits, dtype=np.uint8) & ((1 << bits) - 1)
    low: Array = (codes << np.arange(0, 8, bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
    return low.tobytes()


def powers_of_two(data: bytes) -> bytes:
    """Return the f32 that bytes of E8M0 stand for."""
    stored = np.frombuffer(data, np.uint8)
    values = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    return bytes(file_bytes(np.where(stored == 255, np.float32(np.nan), values).astype(np.float32)))


def unpacked(data: bytes, width: int, bits: int, count: int, dtype: str, *, high_first: bool) -> bytes:
    """Return the first ``count`` codes of a stream of words as numbers of ``dtype``."""
    stream = np.frombuffer(turned_codes(data, width, bits) if high_first else data, np.uint8)
    codes = (stream[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)).reshape(-1)[:count]
    return _stored(codes, dtype)


def converted(data: bytes, stored: str, dtype: str) -> bytes:
    """Return numbers of a type as floats of another; raises ``FormatError`` ``zt2.zero-point``: one that it has not."""
    raw = np.frombuffer(data, np.uint8)
    return _stored(from_file(raw, stored) if DTYPES[stored].is_storage else raw.view(numpy_dtype(stored)), dtype)


def same(_: bytes, value: int, count: int, dtype: str) -> bytes:
    """Return one number ``count`` times, whatever is stored; raises as ``converted``."""
    return _stored(np.full(count, value), dtype)


def each(data: bytes, shape: tuple[int, ...], axis: int, block: int) -> bytes:
    """Return a byte for each element of ``shape``, of one for each ``block`` along ``axis``."""
    own = tuple(size // block if at == axis else size for at, size in enumerate(shape))
    return np.repeat(np.frombuffer(data, np.uint8).reshape(own), block, axis).tobytes()


def _stored(values: Array, dtype: str) -> bytes:
    with np.errstate(over="ignore"):
        made = cast(values.astype(np.float32), dtype)
        wide, own = made.astype(np.float64), values.astype(np.float64)
    # Integers past 2^53 are no numbers of f64; those of our floats that are so large are, but nobody's zero points.
    large = values.dtype.kind in "iu" and bool((np.abs(own) > 2.0**53).any())
    if large or not bool(((wide == own) | (np.isnan(wide) & np.isnan(own))).all()):
        raise FormatError(RULE, f"expected zero points that are numbers of {dtype}, which scales are, found others")
    return bytes(file_bytes(np.ascontiguousarray(made)))


def holds(value: int, dtype: str) -> bool:
    """Whether a type of floats has a number."""
    return abs(value) < 1 << 24 and float(cast(np.array([value], np.float32), dtype).astype(np.float64)[0]) == value
