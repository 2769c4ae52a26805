"""Write the page of a checkpoint, or of two."""

from __future__ import annotations

from ingot.core.options import takes
from ingot.errors import UsageError
from ingot.model.shown import ShownReport
from ingot.ops.report.look import look
from ingot.ops.report.options import ReportOptions
from ingot.ops.report.page import page
from ingot.ops.report.tables import tables
from ingot.stores.table import location_of, write_file


@takes(ReportOptions, "report")
def report(options: ReportOptions) -> ShownReport:
    """Show what a checkpoint is made of, B where there is one, and how far it is from A, on one page.

    Without ``out`` nothing is written.

    Returns
    -------
    ShownReport
        All that the page shows, as figures and tables.

    Raises
    ------
    UsageError
        ``report.page``: a name that does not end in .html; ``target.exists``: it is there, without ``overwrite``.
    FormatError
        As ``look``; other errors as ``ingot.open`` and ``ingot.compare``.
    """
    if options.out is None:
        return ShownReport.from_report(tables(look(options)))
    place = location_of(options.out)
    if not place.lower().endswith((".html", ".htm")):
        raise UsageError(f"expected a page's name that ends in .html, found {place[-80:]!r}", rule="report.page")
    found = look(options)
    write_file(options.out, page(found).encode("utf-8", "backslashreplace"), overwrite=options.overwrite)
    return ShownReport.from_report(tables(found, place))
