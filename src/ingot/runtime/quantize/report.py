"""The report of a quantization: what was chosen, what was written, how large it is and how to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.conversion.report import ConvertReport
from ingot.reporting.report import Bits, Bytes, Count, Figure, Line, Ratio, Report, Seconds, Texts, figures_of, table_of
from ingot.reporting.reportable import Reportable


@dataclass(frozen=True, slots=True)
class StoredType:
    """The tensors of a result that are stored in one way: their number, bytes, and share of all bytes."""

    stored: str
    tensors: Count
    nbytes: Bytes
    share: Ratio
    rules: Texts


@dataclass(frozen=True, slots=True)
class QuantizeReport(Reportable):
    """A finished quantization.

    ``runtime`` is the program and its version, empty if none was stated. ``calibration`` says which statistics were
    used. ``error`` is the RMS error over the RMS value of the tensors whose error was measured; None if none was.
    ``untested`` are schemes with which the program did not run when its profile was written. ``conversion`` is the
    report of the conversion, with every tensor.
    """

    source: str
    destination: str
    runtime: str
    container: str
    preset: str
    calibration: str
    size: Bytes
    source_size: Bytes
    bits_per_weight: Bits
    error: float | None
    seconds: Seconds
    types: Sequence[StoredType]
    commands: Texts
    notes: Texts
    warnings: Texts
    untested: Texts
    conversion: ConvertReport

    def report(self) -> Report:
        """Return the figures, the table of types, and the commands that run the result."""
        left_out = ("types", "conversion", "untested", "notes", "warnings")
        figures = [item for item in figures_of(self) if item.name not in left_out]
        figures += [
            Figure("untested", self.untested, "texts"),
            Figure("notes", self.notes, "texts"),
            Figure("warnings", self.warnings, "texts"),
            Figure("error_text", _error_text(self.error), data=False),
            Figure("runtime_text", self.runtime or "no program", data=False),
            Figure("untested_text", ", ".join(self.untested), data=False),
        ]
        lines = [
            Line("{source} -> {destination}"),
            Line("{runtime_text}: {container}, preset {preset}", "for"),
            Line("{calibration}", "rounding"),
            Line("{source_size} -> {size}, {bits_per_weight} bits per weight", "size"),
            Line("{error_text}", "error"),
            Line("{seconds}", "time"),
            *(Line(text.replace("{", "{{").replace("}", "}}"), "note") for text in self.notes),
        ]
        if self.untested:
            lines.append(Line("not run with this program: {untested_text} (docs/runtimes.md)", "note"))
        heads = {"stored": "stored as", "tensors": "tensors", "nbytes": "size", "share": "share", "rules": "rule"}
        closing = [Line("next:"), Line("  {item}", items="commands", copyable=True)] if self.commands else []
        return Report(figures, lines, [table_of("types", self.types, StoredType, heads)], closing)


def _error_text(error: float | None) -> str:
    if error is None:
        return "not measured"
    if error == 0:
        return "none: every value is kept"
    return f"{100 * error:.2f} % (RMS error over RMS value; not quality: `ingot eval` measures that)"
