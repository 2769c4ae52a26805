"""``ingot lut``."""

from __future__ import annotations

from typing import Annotated

from ingot.cli.declare import declare
from ingot.cli.output import Json, render
from ingot.core.about import About
from ingot.ext.ane.options import LutOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot lut gelu\n\n"
    "  ingot lut silu --range=-8,8 --svg silu.svg\n\n"
    "  ingot lut tanh --domain=-4,4 --outside line --json"
)


@declare("lut", EPILOG)
def command(
    options: LutOptions,
    svg: Annotated[str | None, About("Write a plot to this file.")] = None,
    plot: Annotated[bool, About("Draw the curve and the error.", ("--plot/--no-plot",))] = True,
    overwrite: Annotated[bool, About("Replace a file that exists, for --svg.")] = False,
    json: Json = False,
) -> None:
    """Build the activation table of a function for an Apple Neural Engine: 43 float16 entries, and their error.

    The table is evaluated in half precision, as the published description of the engine says. It has not been tested on
    an engine.
    """
    from ingot.ext.ane.chips.activation import FUNCTIONS
    from ingot.ext.ane.chips.lut_plot import svg_plot, text_plot
    from ingot.ext.ane.lut import lut, lut_report
    from ingot.stores.location import Location

    fitted = lut(options)
    function, _ = FUNCTIONS[options.name]
    if svg is not None:
        Location.parse(svg).write(svg_plot(fitted, function, options.name).encode(), overwrite=overwrite)
    if plot and not json:
        print(text_plot(fitted, function))
    render(lut_report(options.name, fitted), json=json)
