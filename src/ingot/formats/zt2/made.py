"""Conversions of stored parts into parts of Ingot's codecs.

Profiles may store words whose first code is in the high bits, zero points that are packed or integers, and exponents
for scales. The codecs need streams of bytes, low bits first or high bits first, and floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, cast, file_bytes, from_file, numpy_dtype
from ingot.errors import FormatError
from ingot.formats.shared.numbers import ConvertedSource
from ingot.model.part import Part
from ingot.model.tensor import Array

RULE = "zt2.zero-point"


@dataclass(frozen=True, slots=True)
class ConvertedPart:
    """The conversion of a stored part into a part of a codec.

    ``stored`` is the role of the stored part, ``dtype``, ``type`` and ``nbytes`` describe the result, and ``make``
    converts the bytes.
    """

    stored: str
    dtype: str
    nbytes: int
    make: Callable[[bytes], bytes]
    type: str | None = None

    def part(self, stored: Part) -> Part:
        """Return the converted part; at its first access, the bytes of ``stored`` are verified by their digest and
        converted.
        """
        source = ConvertedSource(lambda: self._read(stored), self.nbytes, stored.source.name, stored.digest)
        return Part(self.dtype, self.nbytes, source, type=self.type, where=stored.where, occupies=stored.length)

    def _read(self, stored: Part) -> bytes:
        try:
            return self.make(bytes(stored.view()))
        except FormatError as error:
            raise error.add_location(stored.where) from None


def reverse_words(data: bytes, width: int) -> bytes:
    """Return words of ``width`` bytes with their highest byte first."""
    return np.frombuffer(data, np.uint8).reshape(-1, width)[:, ::-1].tobytes()


def reverse_codes(data: bytes, width: int, bits: int) -> bytes:
    """Return a stream with the first code in the low bits, from words with the first code in the high bits."""
    stream = np.frombuffer(reverse_words(data, width), np.uint8)
    codes = stream[:, None] >> np.arange(8 - bits, -1, -bits, dtype=np.uint8) & ((1 << bits) - 1)
    low: Array = (codes << np.arange(0, 8, bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
    return low.tobytes()


def powers_of_two(data: bytes) -> bytes:
    """Return the f32 values of E8M0 bytes."""
    stored = np.frombuffer(data, np.uint8)
    values = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    return bytes(file_bytes(np.where(stored == 255, np.float32(np.nan), values).astype(np.float32)))


def unpack(data: bytes, width: int, bits: int, count: int, dtype: str, *, high_first: bool) -> bytes:
    """Return the first ``count`` codes of a stream of words as values of ``dtype``."""
    stream = np.frombuffer(reverse_codes(data, width, bits) if high_first else data, np.uint8)
    codes = (stream[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)).reshape(-1)[:count]
    return _to_bytes(codes, dtype)


def convert(data: bytes, stored: str, dtype: str) -> bytes:
    """Return values converted to a float type; raises ``FormatError`` ``zt2.zero-point`` if a value is not exact."""
    raw = np.frombuffer(data, np.uint8)
    return _to_bytes(from_file(raw, stored) if DTYPES[stored].is_storage else raw.view(numpy_dtype(stored)), dtype)


def repeat_value(_: bytes, value: int, count: int, dtype: str) -> bytes:
    """Return a value repeated ``count`` times; raises the errors of ``convert``.

    The first argument, the stored bytes, is ignored.
    """
    return _to_bytes(np.full(count, value), dtype)


def expand_blocks(data: bytes, shape: tuple[int, ...], axis: int, block: int) -> bytes:
    """Return a byte for each element of ``shape``, from a byte for each ``block`` of elements along ``axis``."""
    stored_shape = tuple(size // block if index == axis else size for index, size in enumerate(shape))
    return np.repeat(np.frombuffer(data, np.uint8).reshape(stored_shape), block, axis).tobytes()


def _to_bytes(values: Array, dtype: str) -> bytes:
    with np.errstate(over="ignore"):
        result = cast(values.astype(np.float32), dtype)
        wide, exact = result.astype(np.float64), values.astype(np.float64)
    # Integers past 2^53 are not exact in f64. Larger floats could be, but no format has zero points of this size.
    large = values.dtype.kind in "iu" and bool((np.abs(exact) > 2.0**53).any())
    if large or not bool(((wide == exact) | (np.isnan(wide) & np.isnan(exact))).all()):
        raise FormatError(
            RULE, f"expected zero points that are exact in {dtype}, the type of the scales, found other values"
        )
    return bytes(file_bytes(np.ascontiguousarray(result)))


def is_exact(value: int, dtype: str) -> bool:
    """Return whether a value is exact in a float type."""
    return abs(value) < 1 << 24 and float(cast(np.array([value], np.float32), dtype).astype(np.float64)[0]) == value
