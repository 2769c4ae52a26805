"""A page's data as figures and tables: what `ingot report --json` prints."""

from __future__ import annotations

from ingot.inspect.page.look import Cell, Look, Row, Score
from ingot.inspect.page.sample import Histogram
from ingot.reporting.report import Figure, Line, Report, table_of


def tables(found: Look, page: str | None = None) -> Report:
    """Return everything that a page shows; people get where it is, and the totals."""
    figures = [
        Figure("path", found.path),
        Figure("format", found.format),
        Figure("reference", found.reference),
        Figure("page", page),
        Figure("count", len(found.rows), "count", data=False),
        Figure("elements", found.elements, "count"),
        Figure("nbytes", found.nbytes, "bytes"),
        Figure("bits", 8 * found.nbytes / max(found.elements, 1), "bits"),
        Figure("unread", found.unread, "texts"),
        Figure("receipts", [list(pair) for pair in found.receipts], "data"),
    ]
    lines = [Line("{path}: {format}, {count} tensors, {nbytes}, {bits} bits per element")]
    lines.append(Line("note: {item}", each="unread"))
    if page is not None:
        lines.append(Line("page: {page}"))
    return Report(
        figures,
        lines,
        [
            table_of("tensors", found.rows, Row),
            table_of("cells", found.cells, Cell),
            table_of("histograms", found.histograms, Histogram),
            table_of("evaluations", found.scores, Score),
            *(section.data for section in found.sections),
        ],
    )
