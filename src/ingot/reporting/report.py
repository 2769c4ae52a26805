"""Reports of operations as plain data: figures, tables and lines. Other modules render them.

The result of an operation is a dataclass whose annotations state the units of its numbers (``size: Bytes``,
``share: Ratio``). ``figures_of`` and ``table_of`` read the annotations, so that each quantity is named once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Kind = Literal[
    "text",  # one line; None is none
    "texts",  # a list of texts
    "shape",
    "flag",
    "count",
    "times",  # how many a row stands for; of one nothing is said
    "bytes",
    "position",  # an offset, or bytes to the last one
    "speed",  # bytes per second
    "seconds",
    "ratio",  # a share: 1 is all
    "bits",  # bits per value
    "decibels",
    "cosine",
    "number",
    "error",  # a number; 0 is exact, None not measured
    "counts",  # counts by name
    "data",  # nested; for programs
]

Bytes = int
Count = int
Speed = float
Seconds = float
Ratio = float
Bits = float
Decibels = float
Texts = Sequence[str]
Shape = tuple[int, ...]
Counts = Mapping[str, int]

_KINDS: Mapping[str, Kind] = {
    "str": "text",
    "Texts": "texts",
    "Shape": "shape",
    "bool": "flag",
    "int": "count",
    "Count": "count",
    "Bytes": "bytes",
    "Speed": "speed",
    "Seconds": "seconds",
    "Ratio": "ratio",
    "Bits": "bits",
    "Decibels": "decibels",
    "float": "number",
    "Counts": "counts",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A named value. ``data`` tells whether programs get it; people get what a ``Line`` names."""

    name: str
    value: Any
    kind: Kind = "text"
    data: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A line for people: words, with figures as ``{name}``, after a ``label``.

    ``each`` names a figure that is a list: then there is a line for every item, as ``{item}``. One that is ``whole`` is
    to be copied: no terminal is too narrow for it.
    """

    words: str
    label: str = ""
    each: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: ``name`` for programs (none if empty), ``head`` for people (none if empty).

    ``drop`` orders the columns that go where a terminal is narrow: 1 goes first, 0 never.
    """

    name: str
    kind: Kind = "text"
    head: str = ""
    drop: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values. ``data`` and ``shown`` tell whether programs and people get it; ``after`` follows it as a line.

    A table that is the whole report is a list for programs if it has no name.
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    data: bool = True
    shown: bool = True
    after: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of an operation: ``figures`` by name, ``lines`` that name them, ``tables``, ``closing`` lines."""

    figures: Sequence[Figure] = ()
    lines: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    closing: Sequence[Line] = ()


def figures_of(report: Any, *computed: str) -> list[Figure]:
    """Return the fields of a dataclass, and the properties ``computed``, as figures."""
    kinds = {item.name: kind_of(item.type) for item in fields(report)}
    for name in computed:
        kinds[name] = kind_of(getattr(type(report), name).fget.__annotations__.get("return", ""))
    return [Figure(name, getattr(report, name), kind) for name, kind in kinds.items()]


def data_of(item: Any) -> dict[str, Any]:
    """Return the figures of a report object as programs get them where it is nested in another."""
    return {figure.name: figure.value for figure in figures_of(item)}


def table_of(name: str, items: Iterable[Any], kind: type[Any], heads: Mapping[str, str] | None = None) -> Table:
    """Return dataclasses of one kind as a table with a column for each field; ``heads`` name those that people get."""
    heads = heads or {}
    columns = [Column(item.name, kind_of(item.type), heads.get(item.name, "")) for item in fields(kind)]
    rows = [[getattr(item, column.name) for column in columns] for item in items]
    return Table(name, columns, rows, shown=bool(heads))


def kind_of(annotation: Any) -> Kind:
    """Return what a value is by its annotation's text; what is none of the names above is ``data``."""
    return _KINDS.get(str(annotation).removesuffix(" | None"), "data")
