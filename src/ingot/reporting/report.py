"""Reports of operations as plain data: figures, tables and lines. Other modules render them.

The result of an operation is a dataclass whose annotations state the units of its numbers (``size: Bytes``,
``share: Ratio``). ``figures_of`` and ``table_of`` read the annotations, so that each quantity is named once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeVar

from ingot.core.runtime.memory import format_size
from ingot.errors import printable

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


class Measured(Protocol):
    """A tensor of a report; ``error`` is the result of ``ErrorStats.summary``, None if no value changed."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> Mapping[str, float] | None: ...


T = TypeVar("T", bound=Measured)


def worst_of(tensors: Iterable[T]) -> T | None:
    """Return the tensor with the lowest signal-to-noise ratio."""
    lossy = [tensor for tensor in tensors if tensor.error]
    return min(lossy, key=lambda tensor: (tensor.error or {})["snr_db"], default=None)


def loss(tensors: Iterable[Measured], exact: str | None) -> tuple[list[Figure], Sequence[Line]]:
    """Return figures and lines on what was lost: ``exact`` words where nothing was, else the worst tensor if any."""
    if exact is not None:
        return [], [Line(exact, "exact")]
    worst = worst_of(tensors)
    return ([], ()) if worst is None or worst.error is None else (_figures(worst.name, worst.error), _LINES)


def _figures(name: str, error: Mapping[str, float]) -> list[Figure]:
    return [
        Figure("worst", name, data=False),
        Figure("snr", error["snr_db"], "number", data=False),
        Figure("rms", error["rms"], "number", data=False),
        Figure("max_abs", error["max_abs"], "number", data=False),
    ]


_LINES = (
    Line("worst tensor {worst}: SNR {snr} dB, RMS {rms}, max {max_abs}", "error"),
    Line("           (weight error is not quality: evaluate the model)"),
)


LEFT: tuple[Kind, ...] = ("text", "texts", "shape", "flag")
"""What stands on the left in a table; all else are numbers."""


def number(value: float, digits: int = 4) -> str:
    """Format a figure to ``digits`` significant digits."""
    return f"{value:.{digits}g}"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape as ``768x288``."""
    return "x".join(map(str, shape)) or "scalar"


def size_text(count: int) -> str:
    """Format bytes for people."""
    return format_size(count)


def told(lines: Sequence[Line], figures: Mapping[str, Figure]) -> Iterator[tuple[Line, str]]:
    """Yield each line with its words and the figures in them: once, or for every item of a list."""
    texts = {name: text_of(item.value, item.kind) for name, item in figures.items() if item.kind != "data"}
    for item in lines:
        if not item.each:
            yield item, item.words.format_map(texts)
            continue
        for value in figures[item.each].value:
            yield item, item.words.format_map({**texts, "item": text_of(value, "text")})


def cell(value: Any, column: Column) -> str:
    """Return a value as a cell: nothing is an empty one."""
    if value is None and column.kind != "error":
        return ""
    return _CELLS.get(column.kind, lambda value: text_of(value, column.kind))(value)


def text_of(value: Any, kind: Kind) -> str:
    """Return a value as people read it."""
    if value is None:
        return "-" if kind == "error" else "none"
    return _TEXTS.get(kind, _words)(value)


def _words(value: Any) -> str:
    return printable(str(value))


_TEXTS: Mapping[Kind, Callable[[Any], str]] = {
    "bits": lambda value: f"{value:.3f}",
    "bytes": lambda value: size_text(int(value)),
    "cosine": lambda value: f"{value:.6f}",
    "count": lambda value: f"{value:,}",
    "counts": lambda value: ", ".join(f"{count} {name}" for name, count in value.items()) or "none",
    "decibels": lambda value: f"{value:.2f} dB",
    "error": lambda value: number(value) if value else "exact",
    "flag": lambda value: "yes" if value else "no",
    "number": number,
    "position": str,
    "ratio": lambda value: f"{100 * value:.1f} %",
    "seconds": lambda value: f"{value:.2f} s",
    "shape": shape_text,
    "speed": lambda value: f"{size_text(int(value))}/s",
    "texts": lambda value: ", ".join(map(str, value)),
    "times": lambda value: f"{value}" if value > 1 else "",
}
# In a table the head has the unit, and what stands below each other has as many digits.
_CELLS: Mapping[Kind, Callable[[Any], str]] = {
    "bits": lambda value: f"{value:.2f}",
    "decibels": lambda value: f"{value:.2f}",
}
