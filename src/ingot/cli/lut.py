"""``ingot lut``."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.output import Json
from ingot.cli.render import render
from ingot.errors import UsageError

EPILOG = (
    "Examples:\n\n"
    "  ingot lut gelu\n\n"
    "  ingot lut silu --range=-8,8 --svg silu.svg\n\n"
    "  ingot lut tanh --domain=-4,4 --outside line --json"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("lut", epilog=EPILOG)(command)


def command(
    name: Annotated[str, typer.Argument(help="sigmoid, tanh, gelu, silu, exp or rsqrt.")],
    range: Annotated[str | None, typer.Option("--range", help="Inputs that matter: LOW,HIGH.")] = None,
    domain: Annotated[str | None, typer.Option(help="Where the 33 knots lie: LOW,HIGH; fitted by default.")] = None,
    outside: Annotated[
        str, typer.Option(help="Beyond the knots: clamp to the end knots, as published; line; or best.")
    ] = "clamp",
    svg: Annotated[str | None, typer.Option(help="Write a plot to this file.")] = None,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the curve and the error.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists, for --svg.")] = False,
    json: Json = False,
) -> None:
    """Build the activation table of a function for an Apple Neural Engine: 43 float16 entries, and their error.

    Evaluated in half precision as the published description of the engine says; nothing has run on one.
    """
    from ingot.core.atomic import atomic_write
    from ingot.ops.ane.lut import lut_report
    from ingot.targets.ane.activation import FUNCTIONS, fit_lut
    from ingot.targets.ane.lut_plot import svg_plot, text_plot

    fitted = fit_lut(name, pair(range, "--range"), pair(domain, "--domain"), outside)
    function, _ = FUNCTIONS[name]
    if svg is not None:
        atomic_write(svg, svg_plot(fitted, function, name).encode(), overwrite=overwrite)
    if plot and not json:
        print(text_plot(fitted, function))
    render(lut_report(name, fitted), json=json)


def pair(text: str | None, option: str) -> tuple[float, float] | None:
    """Return the numbers of ``LOW,HIGH``; ``UsageError`` ``ane.function`` for other text."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"expected {option} LOW,HIGH, found {text!r}", rule="ane.function") from None
    return low, high
