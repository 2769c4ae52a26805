"""The report of a quantization: the decisions, the size of the result, and the commands that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.conversion.estimate import Estimate
from ingot.conversion.report import ConvertReport
from ingot.reporting.report import Bits, Bytes, Count, Figure, Line, Ratio, Report, Seconds, Texts, figures_of, table_of
from ingot.reporting.reportable import Reportable


@dataclass(frozen=True, slots=True)
class StoredType:
    """The tensors of a result that are stored in the same way: their number, bytes, and share of all bytes."""

    stored: str
    rules: Texts
    tensors: Count
    nbytes: Bytes
    share: Ratio


@dataclass(frozen=True, slots=True)
class QuantizeReport(Reportable):
    """The report of a finished quantization.

    ``runtime`` is the program and its version, or empty. ``calibration`` names the statistics that were used.
    ``larger`` are reasons why the result has more bits per weight than its preset. ``error`` is the RMS error over the
    RMS value of the tensors whose error was measured, or None. ``kl`` is the mean KL divergence from the model in nats
    per token of a text; None if it was not measured. ``untested`` are schemes with which the program was not run.
    ``conversion`` is the report of the conversion, with every tensor.
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
    kl: float | None
    seconds: Seconds
    larger: Texts
    types: Sequence[StoredType]
    commands: Texts
    notes: Texts
    warnings: Texts
    untested: Texts
    conversion: ConvertReport

    def report(self) -> Report:
        """Return the figures, the table of types, and the commands that run the result."""
        left_out = ("types", "conversion", "untested", "notes", "warnings", "larger")
        figures = [item for item in figures_of(self) if item.name not in left_out]
        figures += [
            Figure("untested", self.untested, "texts"),
            Figure("larger", self.larger, "texts"),
            Figure("notes", self.notes, "texts"),
            Figure("warnings", self.warnings, "texts"),
            Figure("error_text", _error_text(self.error), data=False),
            Figure("runtime_text", self.runtime or "no program", data=False),
            Figure("kl_text", f"{self.kl or 0:.4f} nats per token, from the model", data=False),
            Figure("untested_text", ", ".join(self.untested), data=False),
        ]
        lines = [
            Line("{source} -> {destination}"),
            Line("{runtime_text}: {container}, preset {preset}", "for"),
            Line("{calibration}", "rounding"),
            Line("{source_size} -> {size}, {bits_per_weight} bits per weight", "size"),
            *(Line(_escaped(text), "larger") for text in self.larger),
            Line("{error_text}", "error"),
            *([Line("{kl_text}", "KL")] if self.kl is not None else []),
            Line("{seconds}", "time"),
            *(Line(_escaped(text), "note") for text in self.notes),
        ]
        if self.untested:
            lines.append(Line("the project did not run this program with: {untested_text} (docs/runtimes.md)", "note"))
        heads = {"stored": "stored as", "rules": "rule", "tensors": "tensors", "nbytes": "size", "share": "share"}
        closing = [Line("next:"), Line("  {item}", items="commands", copyable=True)] if self.commands else []
        return Report(figures, lines, [table_of("types", self.types, StoredType, heads)], closing)


def with_estimate(report: Report, estimate: Estimate) -> Report:
    """Return the report of a dry run with the estimated time and memory."""
    figures = [
        Figure("calibration", estimate.mode),
        Figure("estimated_seconds", round(estimate.seconds, 1), "seconds"),
        Figure("estimated_memory", estimate.memory, "bytes"),
        Figure("estimate", estimate.describe(), data=False),
    ]
    closing = [Line("estimate: {estimate}, calibration {calibration}"), Line("size: {size}, {bits} bits per weight")]
    return replace(report, figures=[*report.figures, *figures], closing=[*report.closing, *closing])


def _escaped(text: str) -> str:
    """Return text escaped for the template of a report's line."""
    return text.replace("{", "{{").replace("}", "}}")


def _error_text(error: float | None) -> str:
    if error is None:
        return "not measured"
    if error == 0:
        return "none: every value is kept"
    return f"{100 * error:.2f} % (RMS error over RMS value; not quality: `ingot eval` measures that)"
