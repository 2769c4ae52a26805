"""The findings of ``verify``, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import IngotError
from ingot.reporting.report import Figure, Line, Report, table_of
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of ``verify``.

    ``level`` is ``error`` (the file is damaged or breaks a rule) or ``note`` (allowed, but unusual). ``rule`` is the
    rule's name on the spec page. ``where`` names the file, tensor and part.
    """

    level: str
    rule: str
    where: str
    message: str


def verify_report(path: AnyPath, findings: Sequence[Finding]) -> Report:
    """Return a report of the findings, and whether there is no error among them."""
    errors = sum(item.level == "error" for item in findings)
    figures = [
        Figure("path", Location.parse(path).display),
        Figure("ok", not errors, "flag"),
        Figure("errors", errors, "count", data=False),
        Figure("notes", len(findings) - errors, "count", data=False),
        Figure("texts", [finding_text(item) for item in findings], "texts", data=False),
    ]
    notes = ", {notes} note(s)" if len(findings) > errors else ""
    verdict = "{errors} error(s)" if errors else "ok"
    lines = [Line("{item}", items="texts"), Line(f"{{path}}: {verdict}{notes}")]
    return Report(figures, lines, [table_of("findings", findings, Finding)])


def finding_text(item: Finding) -> str:
    """Return a finding as one line."""
    return f"{item.level}: {item.where}: {item.message} [{item.rule}]"


def finding_of(error: BaseException, location: str) -> Finding:
    """Return the finding for an error; ``location`` is used if the error has none."""
    if isinstance(error, IngotError):
        return Finding("error", error.rule or "error", error.where or location, error.message)
    return Finding("error", "memory", location, "not enough memory to check this tensor")
