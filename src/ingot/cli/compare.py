"""``ingot compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.options import MaxDecompressed
from ingot.cli.output import Json, progress_bar, reader_may_leave
from ingot.cli.render import render

EPILOG = (
    "Examples:\n\n"
    "  ingot compare model.safetensors model-int4.zt\n\n"
    "  ingot compare a.zt b.zt --top 0 --json\n\n"
    "  ingot compare ./base ./tuned --delta tuned.zt"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", epilog=EPILOG)(command)


def command(
    a: Annotated[str, typer.Argument(help="Reference checkpoint.")],
    b: Annotated[str, typer.Argument(help="Checkpoint to compare with it.")],
    delta: Annotated[
        str | None, typer.Option(help="A delta from A: show its size per tensor, and how far A + delta is from B.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Rows to print, worst first; 0 for all.")] = 20,
    max_decompressed: MaxDecompressed = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar; exit code only.")] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: equal, or maximum and RMS error, SNR, cosine; worst first.

    With --delta, A is its base and B the fine-tune. Exit code 0 if all values are equal, 1 if not.
    """
    if delta is not None:
        _cost(a, b, delta, top, quiet, json)
    from ingot.ops.check.compare import compare

    with progress_bar("comparing", quiet=quiet or json) as progress:
        report = compare(a, b, max_decompressed=max_decompressed, progress=progress)
    with reader_may_leave():  # the exit code is an answer of its own
        render(report.report(top), json=json, quiet=quiet)
    raise typer.Exit(0 if report.same else 1)


def _cost(base: str, tuned: str, delta: str, top: int, quiet: bool, json: bool) -> None:
    """Show what a delta costs, largest error first."""
    from ingot.ops.delta.cost import cost_report, delta_cost

    with progress_bar("comparing", quiet=quiet or json) as progress:
        costs = delta_cost(base, delta, tuned, progress=progress)
    with reader_may_leave():
        render(cost_report(base, delta, tuned, costs, top), json=json, quiet=quiet)
    raise typer.Exit(0 if all(item.exact for item in costs) else 1)
