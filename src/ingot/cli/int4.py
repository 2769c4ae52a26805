"""``ingot int4``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ingot.cli.options import Threads
from ingot.cli.output import Json, print_json, progress_bar, size_text
from ingot.cli.tables import line

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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")] = False,
    json: Json = False,
) -> None:
    """Add four-bit forms to a Squish directory of eight bits, in place.

    They count once all are on the disk: until then, and after a kill, the directory is what it was.
    """
    import dataclasses

    from ingot.ops.squish.int4 import add_int4

    with progress_bar("int4", quiet=quiet or json) as progress:
        report = add_int4(path, drop_int8=drop_int8, quantizer=quantizer, threads=threads, progress=progress)
    if json:
        print_json({**dataclasses.asdict(report), "savings_pct": report.savings_pct})
    elif not quiet:
        gone = ", eight bits removed" if report.dropped else ""
        line(
            f"{report.path}: {len(report.converted)} tensors got 4 bits, {len(report.kept)} stay at 8; "
            f"{size_text(report.int8_bytes)} -> {size_text(report.int4_bytes)} ({report.savings_pct:.1f} % less){gone}"
        )
