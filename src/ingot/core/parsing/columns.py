"""Headers decoded at once, in native code, into columns of numbers: what shapes and places of tensors are made of.

Only what is beyond doubt is taken. ``None`` says that somebody else has to look closely, who then says what is wrong,
or only unusual: whatever is taken here has to be what he would find.
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
Places = NDArray[np.int64]


def same(data: Bytes, starts: Places, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows are, byte by byte, what lies at their places in ``data``; none that ends behind it is."""
    found = np.empty(starts.size, bool)
    native.kernels.same(
        data.data, np.ascontiguousarray(starts), np.ascontiguousarray(rows).reshape(-1).view(np.uint8), found
    )
    return found


def zeros(data: Bytes, starts: Places, lengths: Places) -> bool:
    """Whether these spans lie in ``data`` and hold nothing but zeros."""
    return native.kernels.zeros(data.data, np.ascontiguousarray(starts), np.ascontiguousarray(lengths))


T = TypeVar("T")
Array = NDArray[np.int64]
Schema = tuple[str, bool, str, tuple[Any, ...]]

ABSENT = -1


class Spelling(NamedTuple):
    """How digests are spelled: what stands before digits, with how many of these there are, and what is a digit."""

    forms: Sequence[tuple[bytes, int]]
    digits: bytes


USUAL = Spelling(((b"crc32c:0x", 8), (b"sha256:", 64)), b"0123456789abcdefABCDEF")


def field(key: str, kind: str | Schema, *, optional: bool = False) -> Schema:
    """Return a field of a struct: of a kind of ``native/core/table.h``, or a struct or map."""
    if isinstance(kind, str):
        return kind, optional, key, ()
    return kind[0], optional, key, kind[3]


def record(*fields: Schema) -> Schema:
    """Return what has these fields, and no other."""
    return "struct", False, "", fields


def mapping(values: str | Schema) -> Schema:
    """Return a map of any keys, few of them different, to values of one kind."""
    return "map", False, "", (field("", values),)


_Found = bytes | tuple[int, int]


def _memory(found: _Found) -> memoryview:
    """Return numbers as they were found: their bytes, or one of them and how many there are of it."""
    if isinstance(found, bytes):
        return memoryview(found).cast("q")
    return np.broadcast_to(np.int64(found[0]), found[1]).data


class Column:
    """One field of all rows; what its numbers are is said in ``native/core/table.h``.

    ``first``, ``second``, ``third`` are memory of 64-bit integers, which gives Python's when it is indexed, a single
    one where all are alike; ``texts`` are those that codes stand for; ``inner`` are the columns of a struct's fields,
    or those of a map's values.
    """

    __slots__ = ("first", "inner", "second", "texts", "third")

    def __init__(self, found: tuple[_Found, _Found, _Found, list[str], list[Any]]) -> None:
        first, second, third, self.texts, inner = found
        self.first = _memory(first)
        self.second = _memory(second)
        self.third = _memory(third)
        self.inner = [Column(each) for each in inner]

    def text(self, row: int) -> str | None:
        """Return one of the texts that repeat; None where it is absent."""
        code = self.first[row]
        return None if code < 0 else self.texts[code]

    def span(self, row: int) -> slice | None:
        """Return where a value lies in the bytes that were decoded; None where it is absent."""
        begin = self.first[row]
        return None if begin < 0 else slice(begin, begin + self.second[row])

    def sizes(self, row: int) -> tuple[int, ...]:
        """Return the sizes of one row."""
        return tuple(self.first[self.second[row] : self.second[row + 1]])

    def children(self, row: int) -> range:
        """Return the rows of a map's pairs."""
        return range(self.first[row], self.first[row + 1])


def numbers(column: memoryview) -> Array:
    """Return a column's memory as an array, which is a view."""
    return np.frombuffer(column, np.int64) if column.contiguous else np.asarray(column)


def chosen(column: Column, table: Mapping[str, int], default: int = -1, rows: slice | Array = slice(None)) -> Array:
    """Return for each row the number that ``table`` has for its text; ``default`` for one that it does not have.

    ``rows`` are those that are asked for, by default all.
    """
    values = np.array([*(table.get(text, default) for text in column.texts), default], np.int64)  # the last is absent
    return values[numbers(column.first)[rows]]


def spelled(digests: Column, data: Buffer, spelling: Spelling = USUAL) -> NDArray[np.bool_]:
    """Return which texts that were left where they lie in ``data`` are digests as they are spelled, or absent."""
    starts, lengths = (np.ascontiguousarray(numbers(each)) for each in (digests.first, digests.second))
    good = np.empty(starts.size, bool)
    native.kernels.spelled(data, starts, lengths, spelling.forms, spelling.digits, good)
    return good


class Index(Mapping[str, int]):
    """Names with their numbers, which they have by their order. They are looked up in a dict that is made for the
    first who asks: whoever lists them does not."""

    __slots__ = ("_numbers", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._numbers: dict[str, int] | None = None

    def _by_name(self) -> dict[str, int]:
        known = self._numbers
        if known is None:
            with gc_paused():
                known = self._numbers = dict(zip(self.names, range(len(self.names)), strict=True))
        return known

    def __getitem__(self, name: str) -> int:
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name()


class Table(NamedTuple):
    """A map of structs: rows by name, columns in the order of the schema's fields.

    ``rest`` are the bytes with an empty map in its place.
    """

    rows: Index
    columns: list[Column]
    rest: bytes


def cbor_table(
    data: Buffer, row: Schema, under: str, *, max_depth: int, max_items: int, deterministic: bool = False
) -> Table | None:
    """Decode the map of structs under a key of a CBOR map. Limits and forms as of ``cbor.loads``.

    The map counts for ``max_items`` less an eighth; with a rest of as many there are as many in all as are allowed.
    ``Table.rest`` has to be parsed strictly: that proves what is not looked at here.

    Returns
    -------
    Table or None
        None where the strict parser has to look.
    """
    found = native.table_cbor(data, row, under, max_depth, max_items - max_items // 8, deterministic)
    if found is None:
        return None
    begin, end, names, columns = found
    return Table(Index(names), Column(columns).inner, b"".join((data[:begin], b"\xa0", data[end:])))


class Rows(Mapping[str, T], Generic[T]):
    """A mapping whose values are made of columns each time they are asked for; none is kept."""

    __slots__ = ("_make", "_rows")

    def __init__(self, rows: Mapping[str, int], make: Callable[[int], T]) -> None:
        self._rows = rows
        self._make = make

    @property
    def rows(self) -> Mapping[str, int]:
        """The rows by name, in order."""
        return self._rows

    def __getitem__(self, name: str) -> T:
        return self._make(self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows
