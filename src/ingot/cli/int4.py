"""``ingot int4``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ingot.cli.options import Threads
from ingot.cli.output import Json, Quiet, progress_bar
from ingot.cli.render import render

EPILOG = "Examples:\n\n  ingot int4 ./model-squish\n\n  ingot int4 ./model-squish --drop-int8 --json"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("int4", epilog=EPILOG)(command)


def command(
    path: Annotated[str, typer.Argument(help="Squish directory (`ingot convert SRC DIR --format npydir`).")],
    drop_int8: Annotated[
        bool, typer.Option("--drop-int8", help="Remove the eight-bit arrays once four bits are complete.")
    ] = False,
    quantizer: Annotated[
        Literal["mse", "minmax"],
        typer.Option(metavar="NAME", help="Scales by least squared error (mse), or the extremes (minmax)."),
    ] = "mse",
    threads: Threads = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Add four-bit forms to a Squish directory of eight bits, in place.

    They count once all are on the disk: until then, and after a kill, the directory is what it was.
    """
    from ingot.ops.squish.int4 import add_int4

    with progress_bar("int4", quiet=quiet or json) as progress:
        report = add_int4(path, drop_int8=drop_int8, quantizer=quantizer, threads=threads, progress=progress)
    render(report.report(), json=json, quiet=quiet)
