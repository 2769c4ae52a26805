"""``ingot int4``."""

from __future__ import annotations

from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar, render
from ingot.ext.squish.tiers.options import Int4Options

EPILOG = (
    "Examples:\n\n"
    "  ingot int4 ./model-squish\n\n"
    "  ingot int4 ./model-squish --form q4 --group 128 --scales f16\n\n"
    "  ingot int4 ./model-squish --drop-int8 --json"
)


@declare("int4", EPILOG)
def command(options: Int4Options, quiet: Quiet = False, json: Json = False) -> None:
    """Add four-bit forms to a Squish directory of eight-bit tensors, in place.

    Readers use them when all are written. Until then, or if the command is killed, they use the eight-bit tensors.
    """
    from ingot.ext.squish.tiers.int4 import add_int4

    with progress_bar("int4", quiet=quiet or json) as progress:
        report = add_int4(replace(options, progress=progress))
    render(report.report(), json=json, quiet=quiet)
