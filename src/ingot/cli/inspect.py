"""``ingot inspect``."""

from __future__ import annotations

from dataclasses import replace

import typer

from ingot.cli.derive import derived
from ingot.cli.output import Json, progress_bar
from ingot.cli.render import render
from ingot.ops.check.options import InspectOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot inspect model.zt\n\n"
    "  ingot inspect ./Llama-3-8B --by role\n\n"
    "  ingot inspect model.zt --content-id\n\n"
    "  ingot inspect model.zt --tensor lm_head.weight --json\n\n"
    "  ingot inspect model.squizd --no-tensors     (features, and the stack chosen per platform)"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect", epilog=EPILOG)(derived(command))


def command(options: InspectOptions, json: Json = False) -> None:
    """Show what is in a checkpoint: tensors, sizes, codecs, totals. Reads headers, no weights.

    Of a .squizd also its features, and which stack would run it on this machine and on named platforms, with reasons.
    Of a kernel unit (`ingot kernel`) its sections and records, of a compiled program (.hwx) its sections, registers and
    kernels.
    """
    from ingot.ops.ane.recognise import kind_of
    from ingot.ops.check.overview import describe
    from ingot.ops.open import find

    store, name = find(options.path, "pread" if options.content_id else "auto")
    match kind_of(store, name):
        case "kernel":
            from ingot.cli import kernel

            kernel.show(options.path, options.tensors, json)
        case "program":
            from ingot.cli import program

            program.show(options.path, options.tensors, json)
        case _:
            with progress_bar("hashing", quiet=json or not options.content_id) as progress:
                report = describe(replace(options, progress=progress), store, name)
            render(report, json=json)
