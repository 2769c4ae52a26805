"""The report of ``ingot lut`` on an activation table."""

from __future__ import annotations

from ingot.core.options import takes
from ingot.ext.ane.chips.activation import Fitted, fit_lut
from ingot.ext.ane.options import LutOptions
from ingot.reporting.report import Figure, Line, Report

_ENDS = ("first", "last", "low", "high", "clamp_low", "clamp_high")


@takes(LutOptions, "lut")
def lut(options: LutOptions) -> Fitted:
    """Return the activation table of a function. Raises the errors of ``fit_lut``."""
    return fit_lut(options.name, options.range, options.domain, options.outside)


def lut_report(name: str, fitted: Fitted) -> Report:
    """Return a report with the knots of a function's table, its entries, and their error."""
    lut = fitted.lut
    first = float(lut.knot_inputs[0])
    last = float(lut.knot_inputs[-1])
    figures = [
        Figure("function", name),
        Figure("interval", fitted.interval, "data"),
        Figure("domain", (first, last), "data"),
        Figure("clamps", (float(lut.lo), float(lut.hi)), "data"),
        Figure("outside", lut.outside),
        Figure("max_error", fitted.max_error, "number"),
        Figure("worst_x", fitted.worst_x, "number"),
        Figure("rms_error", fitted.rms_error, "number"),
        Figure("entries", lut.entries().astype(float).tolist(), "data"),
        *(
            Figure(key, value, "number", data=False)
            for key, value in zip(_ENDS, (first, last, *fitted.interval, float(lut.lo), float(lut.hi)), strict=True)
        ),
    ]
    beyond = "the end knots" if lut.outside == "clamp" else "lines up to {clamp_low} and {clamp_high}"
    lines = [
        Line(f"{{function}}: 43 entries, 86 bytes; 33 knots from {{first}} to {{last}}, outside {beyond}"),
        Line("  error over [{low}, {high}]: largest {max_error} at {worst_x}, RMS {rms_error}"),
    ]
    return Report(figures, lines)
