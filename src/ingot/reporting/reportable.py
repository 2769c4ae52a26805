"""Results of operations that have a report.

They are in a separate module because ``reporting.html`` imports ``reporting.report``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ingot.reporting.report import Report

_LONGEST = 60  # characters of a value in a ``repr``
_MOST_ITEMS = 4


class Reportable(ABC):
    """The result of an operation, with a report.

    The command line prints the report as text or as JSON. A notebook shows it as HTML. The ``repr`` is short: it states
    the lengths of long lists.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Set ``__repr__`` before ``dataclass`` would generate one."""
        super().__init_subclass__()
        cls.__repr__ = _short_repr  # type: ignore[method-assign]

    @abstractmethod
    def report(self) -> Report:
        """Return all figures, tables and lines of the result."""

    def _repr_html_(self) -> str:
        from ingot.reporting.html import report_html  # noqa: PLC0415 - only notebooks need it

        return report_html(self.report())


def _short_repr(result: Any) -> str:
    """Return the fields of a result as text: lengths instead of long lists, types instead of large values."""
    values = ", ".join(f"{item.name}={_short(getattr(result, item.name))}" for item in fields(result) if item.repr)
    return f"{type(result).__name__}({values})"


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) <= _LONGEST else repr(f"{value[: _LONGEST - 3]}...")
    if isinstance(value, Sequence | Mapping) and len(value) > _MOST_ITEMS:
        return f"<{len(value)} items>"
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    if isinstance(value, Sequence | Mapping):
        return f"<{len(value)} item{'s' * (len(value) > 1)}>"
    return f"<{type(value).__name__}>"


@dataclass(frozen=True, slots=True)
class ReportResult(Report, Reportable):
    """The result of an operation whose only result is a report."""

    def report(self) -> Report:
        """Return this report."""
        return self
