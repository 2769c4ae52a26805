"""Write the page of a checkpoint, or of two."""

from __future__ import annotations

from ingot.core.options import takes
from ingot.errors import UsageError
from ingot.inspect.page.look import look
from ingot.inspect.page.options import ReportOptions
from ingot.inspect.page.page import page
from ingot.inspect.page.tables import tables
from ingot.reporting.report import Report
from ingot.stores.location import Location


@takes(ReportOptions, "report")
def report(options: ReportOptions) -> Report:
    """Show what a checkpoint is made of, B where there is one, and how far it is from A, on one page.

    Without ``out`` nothing is written.

    Returns
    -------
    Report
        All that the page shows, as figures and tables.

    Raises
    ------
    UsageError
        ``report.page``: a name that does not end in .html; ``target.exists``: it is there, without ``overwrite``.
    FormatError
        As ``look``; other errors as ``ingot.open`` and ``ingot.compare``.
    """
    if options.out is None:
        return tables(look(options))
    out = Location.parse(options.out)
    if not out.display.lower().endswith((".html", ".htm")):
        raise UsageError(f"{out.display[-80:]!r} must end in .html: the report is a page", rule="report.page")
    found = look(options)
    out.write(page(found).encode("utf-8", "backslashreplace"), overwrite=options.overwrite)
    return tables(found, out.display)
