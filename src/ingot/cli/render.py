"""Reports as text or as JSON: the one place that gives figures their units and tables their columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.cli.output import number, print_json, shape_text, size_text
from ingot.cli.tables import line, table
from ingot.errors import printable
from ingot.model.report import Column, Figure, Kind, Line, Report, Table

_LEFT: tuple[Kind, ...] = ("text", "texts", "shape", "flag")


def render(report: Report, *, json: bool = False, quiet: bool = False) -> None:
    """Print a report; ``quiet`` leaves out what is for people."""
    if json:
        print_json(data_of(report))
    elif not quiet:
        print_text(report)


def data_of(report: Report) -> Any:
    """Return a report as JSON-like data: figures by name, tables as lists of rows."""
    tables = {item.name: rows_of(item) for item in report.tables if item.data}
    if not any(item.data for item in report.figures) and list(tables) == [""]:
        return tables[""]
    return {item.name: item.value for item in report.figures if item.data} | tables


def rows_of(item: Table) -> list[dict[str, Any]]:
    """Return a table's rows by the names of its columns."""
    named = [(index, column.name) for index, column in enumerate(item.columns) if column.name]
    return [{name: row[index] for index, name in named} for row in item.rows]


def print_text(report: Report) -> None:
    """Print a report for people."""
    figures = {item.name: item for item in report.figures}
    print_lines(report.lines, figures)
    shown = [item for item in report.tables if item.shown]
    for index, item in enumerate(shown):
        if index or report.lines:
            print()
        print_table(item)
    print_lines(report.closing, figures)


def print_lines(lines: Sequence[Line], figures: Mapping[str, Figure]) -> None:
    """Print lines with their figures put in."""
    texts = {name: text_of(item.value, item.kind) for name, item in figures.items() if item.kind != "data"}
    for item in lines:
        label = f"  {item.label:<8} " if item.label else ""
        if not item.each:
            line(label + item.words.format_map(texts))
            continue
        for value in figures[item.each].value:
            line(label + item.words.format_map({**texts, "item": text_of(value, "text")}), whole=item.whole)


def print_table(item: Table) -> None:
    """Print a table's columns that are for people."""
    shown = [(index, column) for index, column in enumerate(item.columns) if column.head]
    columns = [column for _, column in shown]
    left = next((i for i, column in enumerate(columns) if column.kind not in _LEFT), len(columns))
    dropped = sorted((column for column in columns if column.drop), key=lambda column: column.drop)
    rows = [[cell(row[index], column) for index, column in shown] for row in item.rows]
    if item.title:
        line(item.title)
    table([column.head for column in columns], rows, left=left, optional=[column.head for column in dropped])
    if item.after:
        line(item.after)


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
