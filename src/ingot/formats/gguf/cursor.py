"""A cursor that reads the numbers and strings of a GGUF header in order. Each read is checked against the file's
size.
"""

from __future__ import annotations

from array import array
from struct import Struct, calcsize, unpack_from
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import FormatError
from ingot.formats.detect import TRUNCATED_HINT
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes

MAX_HEADER = 100_000_000
"""Maximum bytes of metadata and tensor infos."""

MAX_ELEMENTS = 1 << 24
"""Maximum number of elements of all arrays of the metadata together; as Python objects, they take much more memory."""

REPLACED = "\ufffd"
"""The character that replaces bytes that are not UTF-8."""

_WINDOW = 1 << 18


class Records(NamedTuple):
    """The infos of consecutive tensors, in three lists with one element per tensor.

    ``names`` are the names. ``starts`` are the offsets in the file at which the dimensions begin. ``ranks`` are the
    numbers of dimensions.
    """

    names: list[str]
    starts: array[int]
    ranks: array[int]


class Cursor:
    """A cursor that starts at the first byte of a file and reads the file in windows of doubling size.

    Raises ``FormatError`` ``gguf.truncated`` at the end of the file, ``gguf.header-length`` past ``MAX_HEADER``.
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self._source = source
        self.name = name
        self.size = source.size
        self.position = 0
        self._data = bytearray()
        self._elements = 0
        self.order = "<"
        self._length = Struct("<Q")

    def big_endian(self) -> None:
        """Read all following numbers in big-endian order."""
        self.order, self._length = ">", Struct(">Q")

    def consumed(self) -> bytes:
        """Return the content of the file up to the cursor's position."""
        with memoryview(self._data) as data:
            return bytes(data[: self.position])

    def take(self, count: int) -> memoryview:
        """Return the next ``count`` bytes as a view of the cursor's buffer, which the caller must not retain."""
        start = self.position
        self._need(start + count)
        self.position = start + count
        return memoryview(self._data)[start : start + count]

    def number(self, code: str) -> Any:
        """Return the next number; ``code`` is a format character of ``struct``."""
        return self.fields(code)[0]

    def fields(self, code: str) -> tuple[Any, ...]:
        """Return the next numbers as a tuple; ``code`` is a format of ``struct``."""
        code = self.order + code
        start = self.position
        end = start + calcsize(code)
        if end > len(self._data):
            self._need(end)
        self.position = end
        return unpack_from(code, self._data, start)

    def numbers(self, code: str, count: int) -> list[Any]:
        """Return the next ``count`` numbers as a list; ``code`` is a type code of NumPy without byte order, such as
        ``u2``.
        """
        dtype = np.dtype(self.order + code)
        with self.take(count * dtype.itemsize) as raw:
            values: list[Any] = np.frombuffer(raw, dtype).tolist()
        return values

    def count(self, min_bytes: int, rule: str, items: str) -> int:
        """Return the next u64, a number of items that take at least ``min_bytes`` each.

        Raises ``FormatError`` with ``rule`` if the remaining file is too short for them. ``items`` names them in the
        message.
        """
        count = self.number("Q")
        room = (self.size - self.position) // min_bytes
        if count > room:
            raise FormatError(
                rule,
                f"expected at most {room} {items} in the remaining file, found {count}; {TRUNCATED_HINT}",
                where=self.name,
            )
        return int(count)

    def elements(self, min_bytes: int, element_type: str, location: str) -> int:
        """Return the next u64, the length of an array whose elements take at least ``min_bytes`` each.

        Raises ``FormatError`` ``gguf.array`` if the remaining file is too short for them.
        """
        count = self.count(min_bytes, "gguf.array", f"elements ({element_type})")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise FormatError(
                "gguf.array", f"expected at most {MAX_ELEMENTS} elements in all arrays, found more", where=location
            )
        return count

    def string(self, location: str | None = None) -> str:
        """Return the next string; raises ``FormatError`` ``gguf.string``, ``gguf.utf8``."""
        try:
            return self._string_bytes(location).decode()
        except UnicodeDecodeError as error:
            raise FormatError(
                "gguf.utf8", f"expected UTF-8, found {error.reason}", where=location or self.name
            ) from None

    def text(self, location: str | None = None) -> tuple[str, bytes | None]:
        """Return the next string and, if it is not UTF-8, its bytes; the text then contains U+FFFD.

        Raises ``FormatError`` ``gguf.string``.
        """
        data = self._string_bytes(location)
        text = data.decode(errors="replace")
        return text, bytes(data) if REPLACED in text and text.encode() != data else None

    def _string_bytes(self, location: str | None) -> bytearray:
        start = self.position + 8
        if start > len(self._data):
            self._need(start)
        (length,) = self._length.unpack_from(self._data, self.position)
        if length > self.size - start:
            raise FormatError(
                "gguf.string",
                f"expected a string of at most {self.size - start} bytes, the remaining file, found {length}",
                where=location or self.name,
            )
        end = start + length
        if end > len(self._data):
            self._need(end)
        self.position = end
        return self._data[start:end]

    def strings(self, count: int) -> list[str] | None:
        """Return the next ``count`` strings; None if one is not UTF-8 or exceeds the file.

        If the result is None, the cursor does not move.
        """
        texts: list[str] = []
        position = self.position
        length_at = self._length.unpack_from
        while len(texts) < count:
            data = self._data
            have = len(self._data)
            try:
                while position + 8 <= have and len(texts) < count:
                    start = position + 8
                    end = start + length_at(data, position)[0]
                    if end > have:
                        break
                    texts.append(data[start:end].decode())
                    position = end
            except UnicodeDecodeError:
                return None
            if len(texts) < count and not self._grow(2 * have):
                return None
        self.position = position
        return texts

    def records(self, count: int, max_rank: int) -> Records | None:
        """Return the next ``count`` tensor infos; None if one needs the slower checks.

        Slower checks are needed if a tensor info exceeds the file, has more than ``max_rank`` dimensions, or has a name
        that is not UTF-8. The cursor then does not move.
        """
        records = Records([], array("q"), array("B"))
        names, starts, ranks = records
        position = self.position
        length_at = self._length.unpack_from
        rank_at = Struct(f"{self.order}I").unpack_from
        while len(names) < count:
            data = self._data
            have = len(self._data)
            try:
                while position + 12 <= have and len(names) < count:
                    end = position + 8 + length_at(data, position)[0]
                    start = end + 4
                    if start > have:
                        break
                    (rank,) = rank_at(data, end)
                    if rank > max_rank:
                        return None
                    following = start + 8 * rank + 12  # sizes, type and offset
                    if following > have:
                        break
                    names.append(data[position + 8 : end].decode())
                    starts.append(start)
                    ranks.append(rank)
                    position = following
            except UnicodeDecodeError:
                return None
            if len(names) < count and not self._grow(2 * have):
                return None
        self.position = position
        return records

    def _need(self, end: int) -> None:
        have = len(self._data)
        if end <= have:
            return
        if end > self.size:
            raise FormatError(
                "gguf.truncated",
                f"expected {end} bytes of header or more, found a file of {self.size}; {TRUNCATED_HINT}",
                where=self.name,
            )
        if end > MAX_HEADER:
            raise FormatError(
                "gguf.header-length", f"expected a header of at most {MAX_HEADER} bytes, found more", where=self.name
            )
        self._grow(max(end, 2 * have))

    def _grow(self, size: int) -> bool:
        """Read the file up to ``size`` bytes or to its end; return whether the buffer has grown."""
        have = len(self._data)
        more = min(max(size, _WINDOW), self.size, MAX_HEADER) - have
        if more > 0:
            self._data = self._data + read_bytes(self._source, have, more)
        return more > 0
