"""Reports of operations as plain data: figures (named values), tables, and lines of text. Other modules render them.

The result of an operation is a dataclass whose annotations declare the units of its values (``size: Bytes``, ``share:
Ratio``). ``figures_of`` and ``table_of`` read the annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeVar

from ingot.core.runtime.memory import format_size
from ingot.errors import printable

Unit = Literal[
    "text",  # one line; None is shown as "none"
    "texts",  # a list of strings
    "shape",
    "flag",
    "count",
    "times",  # number of items that a row stands for; 1 is not shown
    "bytes",
    "position",  # an offset, or an exact number of bytes
    "speed",  # bytes per second
    "seconds",
    "ratio",  # a share: 1 is 100 %
    "bits",  # bits per value
    "decibels",
    "cosine",
    "number",
    "error",  # a number; 0 is exact, None is not measured
    "counts",  # counts, keyed by name
    "data",  # nested data, only for programs
]
"""The unit or type of a value, which determines how it is formatted."""

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

_UNITS: Mapping[str, Unit] = {
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
    """A named value of a report.

    If ``data`` is true, the JSON report contains the value. The text report contains it if a ``Line`` refers to it.
    """

    name: str
    value: Any
    unit: Unit = "text"
    data: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the text report: a ``label``, and a template that refers to figures as ``{name}``.

    If ``items`` is the name of a figure that is a list, there is one line per element, and ``{item}`` is the element. A
    ``copyable`` line is a command for the user to copy; it is never wrapped or shortened.
    """

    template: str
    label: str = ""
    items: str = ""
    copyable: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``name`` is its key in JSON, ``head`` its title in text; without a title, the text report omits the column. If a
    terminal is too narrow, columns are omitted in the order of ``drop``, from 1 on; a column with 0 is never omitted.
    """

    name: str
    unit: Unit = "text"
    head: str = ""
    drop: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values.

    ``data`` states whether JSON contains the table, and ``shown`` whether the text does. ``after`` is a line of text
    after the table. If a report consists of one table without a name, its JSON is a list.
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
    """The report of an operation: figures, lines of text that contain them, tables, and lines after the tables."""

    figures: Sequence[Figure] = ()
    lines: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    closing: Sequence[Line] = ()


def figures_of(report: Any, *computed: str) -> list[Figure]:
    """Return the fields of a dataclass as figures, and its properties with the names ``computed``."""
    units = {item.name: unit_of(item.type) for item in fields(report)}
    for name in computed:
        units[name] = unit_of(getattr(type(report), name).fget.__annotations__.get("return", ""))
    return [Figure(name, getattr(report, name), unit) for name, unit in units.items()]


def data_of(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dictionary for JSON."""
    return {figure.name: figure.value for figure in figures_of(item)}


def table_of(name: str, items: Iterable[Any], cls: type[Any], heads: Mapping[str, str] | None = None) -> Table:
    """Return dataclass objects as a table with a column for each field; ``heads`` maps fields to column titles."""
    heads = heads or {}
    columns = [Column(item.name, unit_of(item.type), heads.get(item.name, "")) for item in fields(cls)]
    rows = [[getattr(item, column.name) for column in columns] for item in items]
    return Table(name, columns, rows, shown=bool(heads))


def unit_of(annotation: Any) -> Unit:
    """Return the unit that an annotation declares; ``data`` for annotations that are not in ``_UNITS``."""
    return _UNITS.get(str(annotation).removesuffix(" | None"), "data")


class Measured(Protocol):
    """A tensor of a report; ``error`` is a result of ``ErrorStats.summary``, or None if no value changed."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> Mapping[str, float] | None: ...


T = TypeVar("T", bound=Measured)


def worst_of(tensors: Iterable[T]) -> T | None:
    """Return the tensor with the lowest signal-to-noise ratio; None if no tensor has an error."""
    lossy = [tensor for tensor in tensors if tensor.error]
    return min(lossy, key=lambda tensor: (tensor.error or {})["snr_db"], default=None)


def loss(tensors: Iterable[Measured], exact: str | None) -> tuple[list[Figure], Sequence[Line]]:
    """Return figures and lines about errors.

    If ``exact`` is set, it is the only line. Otherwise, if values changed, lines describe the tensor with the lowest
    signal-to-noise ratio.
    """
    if exact is not None:
        return [], [Line(exact, "exact")]
    worst = worst_of(tensors)
    if worst is None or worst.error is None:
        return [], ()
    if not worst.error["rms"]:
        return [], [Line("none: rounding changed no value", "error")]
    return _figures(worst.name, worst.error), _LINES


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


LEFT_ALIGNED: tuple[Unit, ...] = ("text", "texts", "shape", "flag")
"""Units that tables align to the left; values of other units are numbers, which are aligned to the right."""


def count_text(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as ``1 tensor`` or ``2 tensors``; ``plural`` is for irregular plurals."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def duration_text(seconds: float) -> str:
    """Return an estimated time, such as ``12 s``, ``5 min`` or ``1 h 30 min``."""
    minutes = int(seconds / 60 + 0.5)
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def number(value: float, digits: int = 4) -> str:
    """Format a number to ``digits`` significant digits."""
    return f"{value:.{digits}g}"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape as ``768x288``."""
    return "x".join(map(str, shape)) or "scalar"


def size_text(count: int) -> str:
    """Format a number of bytes with a unit, such as ``MiB``."""
    return format_size(count)


def format_lines(lines: Sequence[Line], figures: Mapping[str, Figure]) -> Iterator[tuple[Line, str]]:
    """Yield each line with its text: the template, filled with figures.

    A line whose ``items`` names a list is yielded once per element, with the element as ``{item}``.
    """
    texts = {name: text_of(item.value, item.unit) for name, item in figures.items() if item.unit != "data"}
    for line in lines:
        if not line.items:
            yield line, line.template.format_map(texts)
            continue
        for value in figures[line.items].value:
            yield line, line.template.format_map({**texts, "item": text_of(value, "text")})


def cell(value: Any, column: Column) -> str:
    """Return the text of a value in a table. For None it is empty, or states that an error was not measured."""
    if value is None and column.unit != "error":
        return ""
    return _CELLS.get(column.unit, lambda value: text_of(value, column.unit))(value)


def text_of(value: Any, unit: Unit) -> str:
    """Return a value as text, formatted for its unit."""
    if value is None:
        return "-" if unit == "error" else "none"
    return _TEXTS.get(unit, _plain_text)(value)


def _plain_text(value: Any) -> str:
    return printable(str(value))


_TEXTS: Mapping[Unit, Callable[[Any], str]] = {
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
# In a table the head contains the unit, and all values of a column have the same number of decimals.
_CELLS: Mapping[Unit, Callable[[Any], str]] = {
    "bits": lambda value: f"{value:.2f}",
    "decibels": lambda value: f"{value:.2f}",
}
