"""``ingot inspect``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ingot.cli import kernel, program
from ingot.cli.output import Json, progress_bar
from ingot.cli.render import render

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
    app.command("inspect", epilog=EPILOG)(command)


def command(
    path: Annotated[str, typer.Argument(help="File or folder.")],
    tensor: Annotated[str | None, typer.Option(help="Show one tensor with its parts and parameters.")] = None,
    by: Annotated[
        Literal["layer", "codec", "dtype", "role"],
        typer.Option(metavar="KEY", help="Totals by layer, codec, dtype or role."),
    ] = "layer",
    list_tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List the tensors.")] = True,
    every: Annotated[bool, typer.Option("--all", help="Show every tensor, not one line for equal layers.")] = False,
    content_id: Annotated[
        bool, typer.Option("--content-id", help="Hash all weights: the same id for the same tensors in any container.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what is in a checkpoint: tensors, sizes, codecs, totals. Reads headers, no weights.

    Of a .squizd also its features, and which stack would run it on this machine and on named platforms, with reasons.
    Of a kernel unit (`ingot kernel`) its sections and records, of a compiled program (.hwx) its sections, registers and
    kernels.
    """
    from ingot.ops.ane.kernel import is_kernel_file
    from ingot.ops.ane.program import is_program_file
    from ingot.ops.check.inspect import inspect

    if is_kernel_file(path):
        kernel.show(path, list_tensors, json)
        return
    if is_program_file(path):
        program.show(path, list_tensors, json)
        return
    if content_id:
        _content_id(path, json)
        return
    from ingot.ops.check.overview import one_tensor, overview

    inspection = inspect(path)
    if tensor is not None:
        render(one_tensor(inspection, tensor), json=json)
    else:
        render(overview(inspection, by, tensors=list_tensors, every=every), json=json)


def _content_id(path: str, json: bool) -> None:
    from ingot.ops.check.overview import identity_report
    from ingot.ops.identity import content_id
    from ingot.ops.open import open as open_checkpoint

    with open_checkpoint(path, io="pread") as checkpoint, progress_bar("hashing", quiet=json) as progress:
        identity = content_id(checkpoint, progress=progress)
    render(identity_report(path, identity), json=json)
