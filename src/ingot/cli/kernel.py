"""``ingot kernel``, and what ``ingot inspect`` prints of a kernel unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ingot.cli.lut import pair
from ingot.cli.output import Json
from ingot.cli.render import render
from ingot.errors import UsageError

EPILOG = (
    "Examples:\n\n"
    "  ingot kernel model.safetensors model.layers.0.mlp.up_proj.weight up.anek --chip m1\n\n"
    "  ingot kernel model.zt conv1.weight conv1.anek --chip m4 --bias conv1.bias --activation gelu\n\n"
    "  ingot kernel model.zt conv1.weight conv1.anek --chip m4 --activation tanh --domain=-3,3 --outside line\n\n"
    "  ingot kernel ./m1-model ./m1-kernels --chip m1\n\n"
    "  ingot inspect up.anek"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("kernel", epilog=EPILOG)(command)


def command(
    path: Annotated[str, typer.Argument(help="Checkpoint.")],
    name: Annotated[str, typer.Argument(help="Tensor, output channels first; without OUT a folder for all of them.")],
    out: Annotated[str | None, typer.Argument(help="File to write, .anek by custom.")] = None,
    chip: Annotated[str, typer.Option(help="Chip to pack for.")] = "m1",
    bias: Annotated[str | None, typer.Option(help="Tensor with a bias per output channel.")] = None,
    activation: Annotated[str | None, typer.Option(help="Function whose table goes in; see `ingot lut`.")] = None,
    domain: Annotated[str | None, typer.Option(help="Where the table's knots lie: LOW,HIGH; as `ingot lut`.")] = None,
    outside: Annotated[str | None, typer.Option(help="Beyond the knots: clamp, line or best; as `ingot lut`.")] = None,
    assume: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, as `ingot plan` takes it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    json: Json = False,
) -> None:
    """Pack a weight for an Apple Neural Engine as published: six sections, records of output-channel groups, tiles.

    Without OUT every kernel of the checkpoint, into a folder. What streams on the chip is packed as it is stored, what
    folds as dense fp16. The layout is partly inferred and has a version; no tool of Apple's reads it.
    """
    if out is None:
        if (bias, activation, domain, outside) != (None, None, None, None):
            raise UsageError("expected --bias and --activation with a tensor and a file", rule="ane.layout")
        _whole(path, name, chip, assume or (), overwrite, json)
        return
    from ingot.ops.ane.kernel import pack_kernel
    from ingot.targets.ane.activation import fit_lut

    if activation is None and (domain, outside) != (None, None):
        raise UsageError("expected --activation NAME with --domain and --outside", rule="ane.function")
    table_of = None
    if activation is not None:
        table_of = fit_lut(activation, None, pair(domain, "--domain"), outside or "clamp").lut
    report = pack_kernel(
        path, name, out, chip, bias=bias, activation=table_of, assume=assume or (), overwrite=overwrite
    )
    render(report.report(), json=json)


def _whole(path: str, folder: str, chip: str, assume: Sequence[str], overwrite: bool, json: bool) -> None:
    """Pack every kernel; exit code 1 if some are refused."""
    from ingot.ops.ane.kernel import pack_model

    report = pack_model(path, folder, chip, assume=assume, overwrite=overwrite)
    render(report.report(), json=json)
    if report.refused:
        raise typer.Exit(1)


def show(path: str, list_records: bool, json: bool) -> None:
    """Print what is in a kernel unit."""
    from ingot.ops.ane.kernel import inspect_kernel

    render(inspect_kernel(path).report(records=list_records), json=json)
