"""Results of operations that notebooks show: each has a report, which is rendered as HTML."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ingot.reporting.report import Report


class Shown(ABC):
    """A result with a report of itself.

    The command line prints the report as text or as JSON. A notebook shows it as HTML.
    """

    __slots__ = ()

    @abstractmethod
    def report(self) -> Report:
        """Return all figures, tables and lines of the result."""

    def _repr_html_(self) -> str:
        from ingot.reporting.html import report_html  # noqa: PLC0415 - only notebooks need it

        return report_html(self.report())


@dataclass(frozen=True, slots=True)
class ShownReport(Report, Shown):
    """A report that is the result itself."""

    def report(self) -> Report:
        """Return this report."""
        return self
