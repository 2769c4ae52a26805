"""``ingot lut``."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.output import Json, number, print_json
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
    from ingot.targets.ane.activation import FUNCTIONS, fit_lut
    from ingot.targets.ane.lut_plot import svg_plot, text_plot

    fitted = fit_lut(name, pair(range, "--range"), pair(domain, "--domain"), outside)
    function, _ = FUNCTIONS[name]
    if svg is not None:
        atomic_write(svg, svg_plot(fitted, function, name).encode(), overwrite=overwrite)
    lut = fitted.lut
    if json:
        print_json(
            {
                "function": name,
                "interval": fitted.interval,
                "domain": (float(lut.places[0]), float(lut.places[-1])),
                "clamps": (float(lut.lo), float(lut.hi)),
                "outside": lut.outside,
                "max_error": fitted.max_error,
                "worst_x": fitted.worst_x,
                "rms_error": fitted.rms_error,
                "entries": lut.entries().astype(float).tolist(),
            }
        )
        return
    if plot:
        print(text_plot(fitted, function))
    beyond = "the end knots" if lut.outside == "clamp" else f"lines up to {float(lut.lo):.5g} and {float(lut.hi):.5g}"
    first, last = lut.places[[0, -1]]
    print(f"{name}: 43 entries, 86 bytes; 33 knots from {first:.5g} to {last:.5g}, outside {beyond}")
    print(
        f"  error over [{fitted.interval[0]:.5g}, {fitted.interval[1]:.5g}]: largest {number(fitted.max_error, 3)} at "
        f"{fitted.worst_x:.5g}, RMS {number(fitted.rms_error, 3)}"
    )


def pair(text: str | None, option: str) -> tuple[float, float] | None:
    """Return the numbers of ``LOW,HIGH``; ``UsageError`` ``ane.function`` for other text."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"expected {option} LOW,HIGH, found {text!r}", rule="ane.function") from None
    return low, high
