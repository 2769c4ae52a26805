"""Values of reports as people read them: the one place that gives figures their units, for terminals and for pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ingot.core.runtime.memory import format_size
from ingot.errors import printable
from ingot.reporting.report import Column, Figure, Kind, Line

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
