"""HTML of reports, for notebooks and for pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from math import prod

from ingot.errors import printable
from ingot.reporting.report import LEFT_ALIGNED, Column, Report, Table, cell, format_lines, number

_ROWS = 60
_LONG = ("tensor", "says", "file", "model")
_SHARES = ("error", "changed", "agreement")


def text_of(value: str) -> str:
    """Return text escaped for HTML; characters that are not printable are shown as escapes."""
    return escape(printable(value))


def report_html(report: Report) -> str:
    """Return a report as HTML: its lines, and the first rows of its tables."""
    figures = {item.name: item for item in report.figures}
    lines = [f"{item.label:<8} {text}" if item.label else text for item, text in format_lines(report.lines, figures)]
    closing = [text for _, text in format_lines(report.closing, figures)]
    parts = [f"<pre>{text_of_lines(lines)}</pre>"] if lines else []
    for table in (item for item in report.tables if item.shown):
        short = replace(table, rows=table.rows[:_ROWS])
        hidden = len(table.rows) - len(short.rows)
        title = f"<p>{text_of(table.title)}</p>" if table.title else ""
        parts.append(title + table_html(short) + (f"<p>... and {hidden:,} more</p>" if hidden else ""))
    return "".join(parts) + (f"<pre>{text_of_lines(closing)}</pre>" if closing else "")


def text_of_lines(lines: Sequence[str]) -> str:
    """Return lines of text as HTML."""
    return "\n".join(map(text_of, lines))


def table_html(table: Table, id: str = "", *, sortable: bool = False) -> str:
    """Return a table as HTML. Columns without a title are omitted.

    Cells of a ``sortable`` table contain their sort keys.
    """
    shown = [(index, column) for index, column in enumerate(table.columns) if column.head]
    classes = {index: _class(column) for index, column in shown}
    button = '<button type="button">{}</button>' if sortable else "{}"
    head = "".join(f'<th scope="col"{classes[n]}>{button.format(text_of(column.head))}</th>' for n, column in shown)
    lines = []
    for row in table.rows:
        cells = (f"<td{classes[n]}{_sort_key(row[n], sortable)}>{_cell(row[n], item)}</td>" for n, item in shown)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    name = f' id="{id}"' if id else ""
    return f"<table{name}><thead><tr>{head}</tr></thead><tbody>{chr(10).join(lines)}</tbody></table>"


def percent(value: float) -> str:
    """Return an error or a share as text: "exact" for 0, else a percentage."""
    return "exact" if value == 0 else f"{100 * value:.3g} %"


def _class(column: Column) -> str:
    if column.head in _LONG:
        return ' class="n"'
    return ' class="l"' if column.unit in LEFT_ALIGNED else ""


def _cell(value: object, column: Column) -> str:
    if value is None:
        return ""
    if column.name in _SHARES and isinstance(value, float):
        return percent(value) if value or column.name == "error" else "0 %"
    return text_of(cell(value, column))


def _sort_key(value: object, sortable: bool) -> str:
    """Return the HTML attribute with a cell's sort key; empty if the browser can sort the cell's text."""
    if not sortable or isinstance(value, str | bool):
        return ""
    if isinstance(value, tuple):
        return f' data-v="{prod(value)}"'
    text = "" if value is None else number(value, 6) if isinstance(value, float) else str(value)
    return f' data-v="{text}"'
