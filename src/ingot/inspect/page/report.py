"""Write the page about one checkpoint, or about two."""

from __future__ import annotations

from ingot.core.options import takes
from ingot.errors import UsageError
from ingot.inspect.page.look import Cell, PageData, Row, Score, collect_page_data
from ingot.inspect.page.options import ReportOptions
from ingot.inspect.page.page import page
from ingot.inspect.page.sample import Histogram
from ingot.reporting.report import Figure, Line, table_of
from ingot.reporting.reportable import ReportResult
from ingot.stores.location import Location


@takes(ReportOptions, "report")
def report(options: ReportOptions) -> ReportResult:
    """Write an HTML page that shows the contents of a checkpoint, and with B the errors of B against A.

    Without ``out`` nothing is written.

    Returns
    -------
    ReportResult
        The figures and tables of the page.

    Raises
    ------
    UsageError
        ``report.page``: a name that does not end in .html; ``target.exists``: the file exists, without ``overwrite``.
    FormatError
        The errors of ``collect_page_data``, ``ingot.open`` and ``ingot.compare``.

    Examples
    --------
    >>> report = ingot.report("model", "int4.zt", out="page.html")
    """
    if options.out is None:
        return _report_of(collect_page_data(options))
    out = Location.parse(options.out)
    if not out.display.lower().endswith((".html", ".htm")):
        raise UsageError(f"{out.display[-80:]!r} must end in .html: the report is a page", rule="report.page")
    contents = collect_page_data(options)
    out.write(page(contents).encode("utf-8", "backslashreplace"), overwrite=options.overwrite)
    return _report_of(contents, out.display)


def _report_of(contents: PageData, page: str | None = None) -> ReportResult:
    """Return a report with all figures and tables of a page; its text has only the path and the totals."""
    figures = [
        Figure("path", contents.path),
        Figure("format", contents.format),
        Figure("reference", contents.reference),
        Figure("page", page),
        Figure("count", len(contents.rows), "count", data=False),
        Figure("elements", contents.elements, "count"),
        Figure("nbytes", contents.nbytes, "bytes"),
        Figure("bits", 8 * contents.nbytes / max(contents.elements, 1), "bits"),
        Figure("unread", contents.unread, "texts"),
        Figure("receipts", [list(pair) for pair in contents.receipts], "data"),
    ]
    lines = [Line("{path}: {format}, {count} tensors, {nbytes}, {bits} bits per element")]
    lines.append(Line("note: {item}", items="unread"))
    if page is not None:
        lines.append(Line("page: {page}"))
    return ReportResult(
        figures,
        lines,
        [
            table_of("tensors", contents.rows, Row),
            table_of("cells", contents.cells, Cell),
            table_of("histograms", contents.histograms, Histogram),
            table_of("evaluations", contents.scores, Score),
            *(section.data for section in contents.sections),
        ],
    )
