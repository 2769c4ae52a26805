"""Manifests in CBOR that Ingot does not write: indefinite lengths, tags and ``undefined`` (RFC 7049).

``ztensor`` 1.2.3 reads them: it skips tags, reads ``undefined`` as ``null``, and reads a bignum (a byte string with tag
2 or 3) as an integer. Ingot first rewrites such a manifest with definite lengths and without tags, then decodes and
checks it like any other.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from ingot.core.parsing.cbor import MAX_DEPTH
from ingot.errors import FormatError
from ingot.model.bytesource import Buffer

RULES = ("cbor.indefinite-length", "cbor.tag", "cbor.simple")
"""Rules of the strict decoder that these manifests break."""

MAX_ITEMS = 1 << 21
"""Maximum items of a manifest that is rewritten: a few seconds of work, and 100,000 tensors."""

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_INDEFINITE = 31
_BREAK = 0xFF
_NULL = 0xF6
_UNDEFINED = 0xF7
_POSITIVE_BIGNUM = 2
_NEGATIVE_BIGNUM = 3
_SIZES = {24: "B", 25: ">H", 26: ">I", 27: ">Q"}
_NOTES = {
    "zt.cbor-indefinite": "the manifest has strings, arrays or maps of indefinite length",
    "zt.cbor-tag": "the manifest has tags, which are skipped",
    "zt.cbor-undefined": "the manifest has undefined values, which are read as null",
}


def rewrite(data: Buffer, location: str) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the CBOR item ``data`` with definite lengths and without tags, and a note for each type of change.

    Raises
    ------
    FormatError
        ``cbor.truncated``, ``cbor.length``, ``cbor.depth``, ``cbor.items``, ``cbor.reserved``, ``cbor.tag``,
        ``cbor.indefinite-length``. The decoder of the result checks the other rules of ``spec/cbor.md``.
    """
    writer = _Rewriter(data, location)
    writer.item(0)
    writer.copy_tail()
    return bytes(writer.out), [(rule, _NOTES[rule]) for rule in _NOTES if rule in writer.seen]


class _Rewriter:
    """A pass that rewrites the bytes of a manifest. ``out`` is the result; ``seen`` are the rules of the notes."""

    def __init__(self, data: Buffer, location: str) -> None:
        self._data = memoryview(data).cast("B")
        self._location = location
        self._position = self._items = 0
        self.out = bytearray()
        self.seen: set[str] = set()

    def copy_tail(self) -> None:
        """Copy the bytes after the item, which the decoder refuses."""
        self.out += self._data[self._position :]

    def item(self, depth: int) -> None:
        """Append the next CBOR item, rewritten, to the output."""
        start = self._position
        tag = None
        major, argument = self._head()
        while major == _TAG:
            self.seen.add("zt.cbor-tag")
            start = self._position
            tag = argument
            major, argument = self._head()
        if major == _BYTES and tag in (_POSITIVE_BIGNUM, _NEGATIVE_BIGNUM):
            self._bignum(argument, start, negative=tag == _NEGATIVE_BIGNUM)
        elif major in (_BYTES, _TEXT):
            self._string(major, argument)
        elif major in (_ARRAY, _MAP):
            self._container(major, argument, depth)
        elif major == _SIMPLE and self._data[start] == _UNDEFINED:
            self.seen.add("zt.cbor-undefined")
            self.out.append(_NULL)
        elif argument is None:
            self._refuse("cbor.indefinite-length", "expected an item, found a break", start)
        else:
            self.out += self._data[start : self._position]

    def _head(self) -> tuple[int, int | None]:
        """Return major type and argument of the next item; None for an indefinite length or a break."""
        start = self._position
        self._items += 1
        if self._items > MAX_ITEMS:
            self._refuse("cbor.items", f"expected at most {MAX_ITEMS} items, found more", start)
        major, info = divmod(self._take(1)[0], 32)
        if info < 24:
            return major, info
        if info in _SIZES:
            size = struct.calcsize(_SIZES[info])
            return major, int(struct.unpack(_SIZES[info], self._take(size))[0])
        if info != _INDEFINITE or major in (_UINT, _NEGATIVE, _TAG):
            self._refuse("cbor.reserved", f"expected additional information that CBOR defines, found {info}", start)
        return major, None

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self._position:
            self._refuse("cbor.truncated", "expected another item, found the end", len(self._data))
        self._position += size
        return self._data[self._position - size : self._position]

    def _bytes(self, length: int) -> memoryview:
        if length > len(self._data) - self._position:
            self._refuse("cbor.length", f"expected {length} bytes of a string, found the end", self._position)
        return self._take(length)

    def _chunks(self, major: int, length: int | None) -> bytes:
        """Return the content of a string; a string of indefinite length consists of strings of definite lengths."""
        if length is not None:
            return bytes(self._bytes(length))
        self.seen.add("zt.cbor-indefinite")
        chunks = []
        while not self._ends():
            start = self._position
            chunk_major, size = self._head()
            if chunk_major != major or size is None:
                self._refuse("cbor.indefinite-length", "expected chunks of the string's own type and length", start)
            chunks.append(bytes(self._bytes(size)))
        return b"".join(chunks)

    def _string(self, major: int, length: int | None) -> None:
        text = self._chunks(major, length)
        self.out += _encode_head(major, len(text))
        self.out += text

    def _bignum(self, length: int | None, start: int, *, negative: bool) -> None:
        value = int.from_bytes(self._chunks(_BYTES, length), "big")
        if value >> 64:
            self._refuse("cbor.tag", "expected an integer of 64 bits, found a larger bignum", start)
        self.out += _encode_head(_NEGATIVE if negative else _UINT, value)

    def _container(self, major: int, length: int | None, depth: int) -> None:
        start = self._position
        outer = self.out
        if depth >= MAX_DEPTH:
            self._refuse("cbor.depth", f"expected at most {MAX_DEPTH} levels of nesting, found more", start)
        items_per_element = 2 if major == _MAP else 1
        if length is None:
            self.seen.add("zt.cbor-indefinite")
            self.out = bytearray()
            count = 0
            while not self._ends():
                self.item(depth + 1)
                count += 1
            if count % items_per_element:
                self._refuse("cbor.indefinite-length", "expected a value for every key, found a break", start)
            outer += _encode_head(major, count // items_per_element)
            outer += self.out
            self.out = outer
        else:
            if length * items_per_element > len(self._data) - self._position:
                self._refuse("cbor.length", f"expected {length} elements, found the end", start)
            outer += _encode_head(major, length)
            for _ in range(length * items_per_element):
                self.item(depth + 1)

    def _ends(self) -> bool:
        """Return whether the next byte is a break, and skip the break."""
        if self._position >= len(self._data):
            self._refuse("cbor.truncated", "expected another item or a break, found the end", self._position)
        ends = self._data[self._position] == _BREAK
        self._position += ends
        return ends

    def _refuse(self, rule: str, message: str, offset: int) -> NoReturn:
        raise FormatError(rule, message, where=f"{self._location}: byte {offset}")


def _encode_head(major: int, argument: int) -> bytes:
    """Return the shortest head of a CBOR item of the major type ``major``."""
    if argument < 24:
        return bytes([major << 5 | argument])
    info = next(info for info, code in _SIZES.items() if argument < 1 << 8 * struct.calcsize(code))
    return bytes([major << 5 | info]) + struct.pack(_SIZES[info], argument)
