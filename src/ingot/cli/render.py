"""Reports as text or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.cli.output import print_json
from ingot.cli.tables import line, table
from ingot.reporting.report import Figure, Line, Report, Table
from ingot.reporting.text import LEFT, cell, told


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
    for item, text in told(lines, figures):
        line((f"  {item.label:<8} " if item.label else "") + text, whole=item.whole)


def print_table(item: Table) -> None:
    """Print a table's columns that are for people."""
    shown = [(index, column) for index, column in enumerate(item.columns) if column.head]
    columns = [column for _, column in shown]
    left = next((i for i, column in enumerate(columns) if column.kind not in LEFT), len(columns))
    dropped = sorted((column for column in columns if column.drop), key=lambda column: column.drop)
    rows = [[cell(row[index], column) for index, column in shown] for row in item.rows]
    if item.title:
        line(item.title)
    table([column.head for column in columns], rows, left=left, optional=[column.head for column in dropped])
    if item.after:
        line(item.after)
