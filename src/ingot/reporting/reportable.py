"""Results of operations that have a report.

They are in a separate module because ``reporting.html`` imports ``reporting.report``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ingot.reporting.report import Report


class Reportable(ABC):
    """A result of an operation that has a report.

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
class ReportResult(Report, Reportable):
    """The result of an operation that returns only a report."""

    def report(self) -> Report:
        """Return this report."""
        return self
