"""Sections that extensions add to the page of ``ingot report``, registered in the group ``ingot.report_sections``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.core.registry import Instances
from ingot.inspect.page.options import ReportOptions
from ingot.model.checkpoint import Checkpoint
from ingot.reporting.report import Table, table_of


class ReportSection(Protocol):
    """A table about a checkpoint.

    ``title`` is the heading on the page, ``row`` the dataclass of a row, ``heads`` the columns of the page with their
    headings. The section's data has the name of its entry point.
    """

    title: str
    row: type[Any]
    heads: Mapping[str, str]

    def rows(self, checkpoint: Checkpoint, options: ReportOptions) -> Sequence[Any]:
        """Return the rows; an empty section is not on the page. Raises ``IngotError``."""
        ...


@dataclass(frozen=True, slots=True)
class FilledSection:
    """A section with its rows."""

    name: str
    title: str
    data: Table
    page: Table


REPORT_SECTIONS: Instances[ReportSection] = Instances(
    "report section", group="ingot.report_sections", contract=ReportSection
)


def fill_sections(checkpoint: Checkpoint, options: ReportOptions) -> list[FilledSection]:
    """Return the sections of all extensions."""
    filled = []
    for name, section in REPORT_SECTIONS.available():
        rows = section.rows(checkpoint, options)
        data, page = (table_of(name, rows, section.row, heads) for heads in ({}, section.heads))
        filled.append(FilledSection(name, section.title, data, page))
    return filled
