"""The report of a sweep: sizes and measurements of each preset, also as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.reporting.report import (
    LEFT_ALIGNED,
    Bits,
    Bytes,
    Column,
    Line,
    Report,
    Seconds,
    Table,
    cell,
    figures_of,
    format_lines,
)
from ingot.reporting.reportable import Reportable


@dataclass(frozen=True, slots=True)
class TextScore:
    """The measurements of a result on one text, as in ``Evaluation``; NaN becomes null in JSON.

    ``kl_interval`` is the 95 % interval of ``kl``; None if the text has too few windows.
    """

    text: str
    perplexity: float | None
    kl: float | None = None
    kl_interval: tuple[float | None, float | None] | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One preset: its container, the size and bits per weight of all files, the times, and a score for each text."""

    preset: str
    container: str
    size: Bytes
    bits_per_weight: Bits
    quantize_seconds: Seconds
    measure_seconds: Seconds
    scores: Sequence[TextScore]


@dataclass(frozen=True, slots=True)
class SweepReport(Reportable):
    """A finished sweep: the model's own scores, and a row for each preset, in the order of the options.

    ``tokens`` are the numbers of tokens that were read of each text. ``statistics`` says where the statistics of
    calibrated presets come from; empty if there is no such preset. ``runtime`` is empty if no program was stated.
    """

    model: str
    runtime: str
    size: Bytes
    window: int
    tokens: Sequence[int]
    statistics: str
    original: Sequence[TextScore]
    rows: Sequence[SweepRow]

    def report(self) -> Report:
        """Return the figures, and a table with a row for the model and for each preset."""
        names = [score.text for score in self.original]
        counts = ", ".join(f"{count} of {name}" for name, count in zip(names, self.tokens, strict=True))
        lines = [
            Line("{model}, {size}"),
            Line(f"tokens, in windows of {self.window}: {counts}".replace("{", "{{").replace("}", "}}")),
        ]
        lines += [Line("statistics: {statistics}")] if self.statistics else []
        return Report(figures_of(self), lines, [self._table(names)])

    def _table(self, names: Sequence[str]) -> Table:
        columns = [Column("", head="preset"), Column("", "bits", "bits"), Column("", "bytes", "size", drop=2)]
        for name in names:
            columns += [Column("", "number", f"KL {name}"), Column("", "number", f"perplexity {name}", drop=4)]
            columns.append(Column("", "ratio", f"top-1 {name}", drop=3))
        columns.append(Column("", "seconds", "quantizing", drop=1))
        model = ["(the model)", None, self.size, *_cells(self.original), None]
        rows = [
            [row.preset, row.bits_per_weight, row.size, *_cells(row.scores), row.quantize_seconds] for row in self.rows
        ]
        return Table("", columns, [model, *rows], data=False)


def _cells(scores: Sequence[TextScore]) -> list[float | None]:
    return [value for score in scores for value in (score.kl, score.perplexity, score.agreement)]


def report_markdown(title: str, report: Report) -> str:
    """Return a report as a Markdown page: a title, its lines as a list, and its tables."""
    figures = {item.name: item for item in report.figures}
    lines = [f"- {_escaped(text)}\n" for _, text in format_lines([*report.lines, *report.closing], figures)]
    tables = [_table(table) for table in report.tables if table.shown]
    return "\n".join([f"# {_escaped(title)}\n", "".join(lines), *tables])


def _table(table: Table) -> str:
    shown = [(index, column) for index, column in enumerate(table.columns) if column.head]
    rows = [[column.head for _, column in shown]]
    rows.append(["---" if column.unit in LEFT_ALIGNED else "---:" for _, column in shown])
    rows += [[_escaped(cell(row[index], column)) for index, column in shown] for row in table.rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _escaped(text: str) -> str:
    """Return text in which no character has a meaning in Markdown."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>#|" else char for char in text)
