"""Reading a header whose length nobody states: numbers and strings one after the other, each proven to be there."""

from __future__ import annotations

from array import array
from struct import Struct, calcsize, unpack_from
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import FormatError
from ingot.formats.foreign import CUT_OFF
from ingot.model.bytesource import ByteSource
from ingot.model.ranges import read_bytes

MAX_HEADER = 100_000_000
"""Metadata and tensor infos may not take more bytes."""

MAX_ELEMENTS = 1 << 24
"""All arrays of the metadata together may not have more: each becomes an object of Python's, many times its size."""

REPLACED = "\ufffd"
"""What stands in a text for bytes that are not UTF-8."""

_WINDOW = 1 << 18


class Records(NamedTuple):
    """Tensor infos: for each its name, where its sizes begin, and how many sizes it has."""

    names: list[str]
    starts: array[int]
    ranks: array[int]


class Cursor:
    """The bytes of a file from its beginning, read in windows that double.

    Raises ``FormatError`` ``gguf.truncated`` where the file ends, ``gguf.header-length`` past ``MAX_HEADER``.
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self._source, self.name, self.size = source, name, source.size
        self.position = 0
        self._data = bytearray()
        self._elements = 0
        self.order = "<"
        self._length = Struct("<Q")

    def big_endian(self) -> None:
        """Read all numbers that follow in big-endian order."""
        self.order, self._length = ">", Struct(">Q")

    def consumed(self) -> bytes:
        """Return the bytes that were read so far."""
        with memoryview(self._data) as data:
            return bytes(data[: self.position])

    def take(self, count: int) -> memoryview:
        """Return the next ``count`` bytes; the memory is the cursor's and is not kept."""
        start = self.position
        self._need(start + count)
        self.position = start + count
        return memoryview(self._data)[start : start + count]

    def number(self, code: str) -> Any:
        """Return the next number; ``code`` as ``struct`` has it."""
        return self.fields(code)[0]

    def fields(self, code: str) -> tuple[Any, ...]:
        """Return the next numbers; ``code`` as ``struct`` has it."""
        code = self.order + code
        start = self.position
        end = start + calcsize(code)
        if end > len(self._data):
            self._need(end)
        self.position = end
        return unpack_from(code, self._data, start)

    def numbers(self, code: str, count: int) -> list[Any]:
        """Return ``count`` numbers of a NumPy type code, such as ``u2``."""
        form = np.dtype(self.order + code)
        with self.take(count * form.itemsize) as raw:
            values: list[Any] = np.frombuffer(raw, form).tolist()
        return values

    def count(self, least: int, rule: str, what: str) -> int:
        """Return the next 64-bit count of things of at least ``least`` bytes; refuse more than there is room for."""
        count = self.number("Q")
        room = (self.size - self.position) // least
        if count > room:
            raise FormatError(
                rule, f"expected at most {room} {what}, which the file has room for, found {count}", where=self.name
            )
        return int(count)

    def elements(self, least: int, kind: str, where: str) -> int:
        """Return the next length of an array whose elements take ``least`` bytes; raises ``gguf.array``."""
        count = self.count(least, "gguf.array", f"elements ({kind})")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise FormatError(
                "gguf.array", f"expected at most {MAX_ELEMENTS} elements in all arrays, found more", where=where
            )
        return count

    def string(self, where: str | None = None) -> str:
        """Return the next string; raises ``FormatError`` ``gguf.string``, ``gguf.utf8``."""
        try:
            return self._string_bytes(where).decode()
        except UnicodeDecodeError as error:
            raise FormatError("gguf.utf8", f"expected UTF-8, found {error.reason}", where=where or self.name) from None

    def text(self, where: str | None = None) -> tuple[str, bytes | None]:
        """Return the next string, which may be any bytes; those only if they are not UTF-8 (U+FFFD in the text).

        Raises ``FormatError`` ``gguf.string``.
        """
        data = self._string_bytes(where)
        text = data.decode(errors="replace")
        return text, bytes(data) if REPLACED in text and text.encode() != data else None

    def _string_bytes(self, where: str | None) -> bytearray:
        start = self.position + 8
        if start > len(self._data):
            self._need(start)
        (length,) = self._length.unpack_from(self._data, self.position)
        if length > self.size - start:
            raise FormatError(
                "gguf.string",
                f"expected a string of at most {self.size - start} bytes, which the file has, found {length}",
                where=where or self.name,
            )
        end = start + length
        if end > len(self._data):
            self._need(end)
        self.position = end
        return self._data[start:end]

    def strings(self, count: int) -> list[str] | None:
        """Return the next ``count`` strings.

        Return None if one is not UTF-8 or not in the file; the cursor then stays where it was.
        """
        texts: list[str] = []
        position, length_at = self.position, self._length.unpack_from
        while len(texts) < count:
            data, have = self._data, len(self._data)
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
        """Return the next ``count`` tensor infos.

        Return None if one is not in the file, has more than ``max_rank`` sizes, or a name that is not UTF-8; the
        cursor then stays where it was.
        """
        records = Records([], array("q"), array("B"))
        names, starts, ranks = records
        position, length_at, rank_at = self.position, self._length.unpack_from, Struct(f"{self.order}I").unpack_from
        while len(names) < count:
            data, have = self._data, len(self._data)
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
                f"expected {end} bytes of header or more, found a file of {self.size}; {CUT_OFF}",
                where=self.name,
            )
        if end > MAX_HEADER:
            raise FormatError(
                "gguf.header-length", f"expected a header of at most {MAX_HEADER} bytes, found more", where=self.name
            )
        self._grow(max(end, 2 * have))

    def _grow(self, wanted: int) -> bool:
        """Read so many bytes of the file, or as many as there may be; return whether they are more than before."""
        have = len(self._data)
        more = min(max(wanted, _WINDOW), self.size, MAX_HEADER) - have
        if more > 0:
            self._data = self._data + read_bytes(self._source, have, more)
        return more > 0
