"""Headers decoded at once, in native code, into columns of numbers: what shapes and places of tensors are made of.

Only what is beyond doubt is taken. ``None`` says that somebody else has to look closely, who then says what is wrong,
or only unusual: whatever is taken here has to be what he would find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ingot.core import native
from ingot.core.gcpause import gc_paused

T = TypeVar("T")
Array = NDArray[np.int64]
Schema = tuple[str, bool, str, tuple[Any, ...]]

ABSENT = -1

_AT_ONCE = 1 << 12  # digests that are looked at together, so that they take little memory


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


class Column:
    """One field of all rows; what its numbers are is said in ``native/core/table.h``.

    ``first``, ``second``, ``third`` are memory of 64-bit integers, which gives Python's when it is indexed; ``texts``
    are those that codes stand for; ``inner`` are the columns of a struct's fields, or those of a map's values.
    """

    __slots__ = ("first", "inner", "second", "texts", "third")

    def __init__(self, found: tuple[bytes, bytes, bytes, list[str], list[Any]]) -> None:
        first, second, third, self.texts, inner = found
        self.first, self.second, self.third = (memoryview(each).cast("q") for each in (first, second, third))
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
    return np.frombuffer(column, np.int64)


def chosen(column: Column, table: Mapping[str, int], default: int = -1, rows: slice | Array = slice(None)) -> Array:
    """Return for each row the number that ``table`` has for its text; ``default`` for one that it does not have.

    ``rows`` are those that are asked for, by default all.
    """
    values = np.array([*(table.get(text, default) for text in column.texts), default], np.int64)  # the last is absent
    return values[numbers(column.first)[rows]]


def spelled(digests: Column, data: bytes, spelling: Spelling = USUAL) -> NDArray[np.bool_]:
    """Return which texts that were left where they lie in ``data`` are digests as they are spelled, or absent."""
    starts, lengths, memory = numbers(digests.first), numbers(digests.second), np.frombuffer(data, np.uint8)
    is_digit = np.zeros(256, bool)
    is_digit[np.frombuffer(spelling.digits, np.uint8)] = True
    good: NDArray[np.bool_] = starts < 0
    for prefix, digits in spelling.forms:
        fitting = np.flatnonzero(lengths == len(prefix) + digits)
        for first in range(0, fitting.size, _AT_ONCE):
            own = fitting[first : first + _AT_ONCE]
            text = memory[starts[own, None] + np.arange(len(prefix) + digits)]
            heads = (text[:, : len(prefix)] == np.frombuffer(prefix, np.uint8)).all(1)
            good[own] = heads & is_digit[text[:, len(prefix) :]].all(1)
    return good


class Table(NamedTuple):
    """A map of structs: rows by name, columns in the order of the schema's fields.

    ``rest`` are the bytes without the map, which is empty there, or of what was aside.
    """

    rows: dict[str, int]
    columns: list[Column]
    rest: bytes


def json_table(data: bytes, row: Schema, *, under: str = "", aside: str = "") -> Table | None:
    """Decode the map of structs under a key of a JSON object, or the object itself where that is empty.

    ``rest`` has to be parsed by whoever asks, strictly: that proves what is not looked at here. It is the object with
    an empty map under the key. Without a key it is an object with nothing but what stands under ``aside``, if that is
    there.

    Returns
    -------
    Table or None
        None where the bytes deserve a closer look.
    """
    found = native.table_json(data, row, under, aside)
    if found is None:
        return None
    begin, end, first, last = found[:4]
    if under:
        return _table(found, data[:begin] + b"{}" + data[end:])
    return _table(found, b'{"' + aside.encode() + b'":' + data[first:last] + b"}" if last else b"{}")


def cbor_table(
    data: bytes, row: Schema, under: str, *, max_depth: int, max_items: int, deterministic: bool = False
) -> Table | None:
    """Decode the map of structs under a key of a CBOR map; as ``json_table``. Limits and forms as of ``cbor.loads``.

    The map counts for ``max_items`` less an eighth; with a rest of as many there are as many in all as are allowed.
    """
    found = native.table_cbor(data, row, under, max_depth, max_items - max_items // 8, deterministic)
    return None if found is None else _table(found, data[: found[0]] + b"\xa0" + data[found[1] :])


def _table(found: Any, rest: bytes) -> Table | None:
    names = found[4]
    with gc_paused():
        rows = dict(zip(names, range(len(names)), strict=True))
        return Table(rows, Column(found[5]).inner, rest) if len(rows) == len(names) else None


class Rows(Mapping[str, T], Generic[T]):
    """A mapping whose values are made of columns each time they are asked for; none is kept."""

    __slots__ = ("_make", "_rows")

    def __init__(self, rows: Mapping[str, int], make: Callable[[int], T]) -> None:
        self._rows, self._make = rows, make

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


class Heads:
    """Heads of records that follow each other, as ``native/core/heads.h`` has their layouts; one thread at a time."""

    def __init__(self, layout: str, *, big_endian: bool = False) -> None:
        self._heads = native.Heads(layout, big_endian)

    @property
    def count(self) -> int:
        """How many were taken."""
        rows: int = self._heads.rows()
        return rows

    def take(self, data: bytes | bytearray | memoryview, at: int, most: int) -> int | None:
        """Take up to ``most`` heads that lie in ``data`` as a whole, from ``at`` on.

        Returns where the next one begins, perhaps behind the end; None where they deserve a closer look.
        """
        place: int | None = self._heads.take(data, at, most)
        return place

    def columns(self) -> Sequence[Column]:
        """Return the columns of what was taken, one for each field: texts that do not repeat are its ``texts``."""
        with gc_paused():
            return [Column(each) for each in self._heads.columns()]
