"""Fast decoding of headers by native code into columns of integers, such as shapes and offsets of tensors.

The fast path accepts only input that the strict parser would accept with the same result. For all other input it
returns None; then the strict parser reads the header and raises the precise error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ingot.core.bytes.checksums import Buffer
from ingot.core.runtime import native
from ingot.core.runtime.memory import gc_paused

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]


def same(data: Bytes, starts: Offsets, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each row whether its bytes equal the bytes at its offset in ``data``; False past the end."""
    equal = np.empty(starts.size, bool)
    native.kernels.same(
        data.data, np.ascontiguousarray(starts), np.ascontiguousarray(rows).reshape(-1).view(np.uint8), equal
    )
    return equal


def zeros(data: Bytes, starts: Offsets, lengths: Offsets) -> bool:
    """Return whether these spans are inside ``data`` and all their bytes are zero."""
    return native.kernels.zeros(data.data, np.ascontiguousarray(starts), np.ascontiguousarray(lengths))


T = TypeVar("T")
Array = NDArray[np.int64]
Schema = tuple[str, bool, str, tuple[Any, ...]]


class DigestSyntax(NamedTuple):
    """The syntax of digest texts: each valid prefix with its number of digits, and the valid digits."""

    prefixes: Sequence[tuple[bytes, int]]
    digits: bytes


USUAL = DigestSyntax(((b"crc32c:0x", 8), (b"sha256:", 64)), b"0123456789abcdefABCDEF")


def field(key: str, value: str | Schema, *, optional: bool = False) -> Schema:
    """Return the schema of a struct's field; ``value`` is a type of ``native/core/table.h``, or a struct or map."""
    if isinstance(value, str):
        return value, optional, key, ()
    return value[0], optional, key, value[3]


def record(*fields: Schema) -> Schema:
    """Return the schema of a struct with exactly these fields."""
    return "struct", False, "", fields


def mapping(values: str | Schema) -> Schema:
    """Return the schema of a map whose keys are not declared and whose values all have the schema ``values``.

    The decoder is fast only if few keys are different.
    """
    return "map", False, "", (field("", values),)


_Integers = bytes | tuple[int, int]


def _memory(integers: _Integers) -> memoryview:
    """Return a column's 64-bit integers, which the native code returns as bytes or as (value, number of
    repetitions).
    """
    if isinstance(integers, bytes):
        return memoryview(integers).cast("q")
    return np.broadcast_to(np.int64(integers[0]), integers[1]).data


class Column:
    """The values of one field in all rows of a decoded table; ``native/core/table.h`` defines the integers.

    ``first``, ``second`` and ``third`` are memoryviews of 64-bit integers. If all integers are equal, only one is in
    memory. ``texts`` are the different texts of the column. ``inner`` are the columns of a struct's fields, or of a
    map's values.
    """

    __slots__ = ("first", "inner", "second", "texts", "third")

    def __init__(self, decoded: tuple[_Integers, _Integers, _Integers, list[str], list[Any]]) -> None:
        first, second, third, self.texts, inner = decoded
        self.first = _memory(first)
        self.second = _memory(second)
        self.third = _memory(third)
        self.inner = [Column(item) for item in inner]

    def text(self, row: int) -> str | None:
        """Return the text of a row; None if it is absent."""
        code = self.first[row]
        return None if code < 0 else self.texts[code]

    def span(self, row: int) -> slice | None:
        """Return the range of a row's value in the decoded bytes; None if it is absent."""
        begin = self.first[row]
        return None if begin < 0 else slice(begin, begin + self.second[row])

    def sizes(self, row: int) -> tuple[int, ...]:
        """Return the integers of a row whose field is a list, such as a shape."""
        return tuple(self.first[self.second[row] : self.second[row + 1]])

    def children(self, row: int) -> range:
        """Return the rows of ``inner[0]`` that contain the values of the map in ``row``."""
        return range(self.first[row], self.first[row + 1])


def numbers(column: memoryview) -> Array:
    """Return a column's memory as an array (a view)."""
    return np.frombuffer(column, np.int64) if column.contiguous else np.asarray(column)


def map_texts(column: Column, table: Mapping[str, int], default: int = -1, rows: slice | Array = slice(None)) -> Array:
    """Return ``table[text]`` for the text of each of ``rows``; ``default`` for texts that are absent or not in
    ``table``.
    """
    values = np.array([*(table.get(text, default) for text in column.texts), default], np.int64)  # code -1 is absent
    return values[numbers(column.first)[rows]]


def are_digests(texts: Column, data: Buffer, syntax: DigestSyntax = USUAL) -> NDArray[np.bool_]:
    """Return for each text, a span of ``data``, whether it is a digest in this syntax or absent."""
    starts, lengths = (np.ascontiguousarray(numbers(column)) for column in (texts.first, texts.second))
    valid = np.empty(starts.size, bool)
    native.kernels.spelled(data, starts, lengths, syntax.prefixes, syntax.digits, valid)
    return valid


class Index(Mapping[str, int]):
    """Maps names to their positions; the first lookup creates the dict, iteration does not need it."""

    __slots__ = ("_numbers", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._numbers: dict[str, int] | None = None

    def _by_name(self) -> dict[str, int]:
        numbers_by_name = self._numbers
        if numbers_by_name is None:
            with gc_paused():
                numbers_by_name = self._numbers = dict(zip(self.names, range(len(self.names)), strict=True))
        return numbers_by_name

    def __getitem__(self, name: str) -> int:
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name()


class Table(NamedTuple):
    """A decoded map of structs: rows by name, columns in the order of the schema's fields.

    ``remainder`` is the encoded document with an empty map in place of the decoded one.
    """

    rows: Index
    columns: list[Column]
    remainder: bytes


def cbor_table(
    data: Buffer, row: Schema, under: str, *, max_depth: int, max_items: int, deterministic: bool = False
) -> Table | None:
    """Decode the map of structs under the key ``under`` of a CBOR map, with the limits of ``cbor.loads``.

    The map may have seven eighths of ``max_items``, which leaves an eighth for the remaining document. The caller must
    parse ``Table.remainder`` by ``cbor.loads``, because this function does not check it.

    Returns
    -------
    Table or None
        None if the strict parser must read the document.
    """
    decoded = native.table_cbor(data, row, under, max_depth, max_items - max_items // 8, deterministic)
    if decoded is None:
        return None
    begin, end, names, columns = decoded
    return Table(Index(names), Column(columns).inner, b"".join((data[:begin], b"\xa0", data[end:])))


class Rows(Mapping[str, T], Generic[T]):
    """A mapping whose values are computed from the columns of a ``Table`` at each access, without caching."""

    __slots__ = ("_make", "_rows")

    def __init__(self, rows: Mapping[str, int], make: Callable[[int], T]) -> None:
        self._rows = rows
        self._make = make

    @property
    def rows(self) -> Mapping[str, int]:
        """The index of each name's row in the table's columns, in the order of the table."""
        return self._rows

    def __getitem__(self, name: str) -> T:
        return self._make(self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows
