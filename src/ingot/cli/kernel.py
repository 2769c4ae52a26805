"""``ingot kernel``, and what ``ingot inspect`` prints of a kernel unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from ingot.cli.lut import pair
from ingot.cli.output import Json, print_json, shape_text, size_text
from ingot.cli.tables import line, table
from ingot.errors import UsageError, printable

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
    if json:
        print_json(report)
        return
    decision = report.decision
    print(f"{report.path}: {size_text(report.nbytes)}, {report.form} for {report.chip}")
    print(f"  the weight {decision.outcome}: {decision.reason} ({decision.gate}; {decision.evidence})")


def _whole(path: str, folder: str, chip: str, assume: Sequence[str], overwrite: bool, json: bool) -> None:
    """Pack every kernel; exit code 1 if some are refused."""
    from ingot.ops.ane.kernel import pack_model

    report = pack_model(path, folder, chip, assume=assume, overwrite=overwrite)
    if json:
        print_json(report)
    else:
        size = sum(item.nbytes for item in report.kernels)
        print(f"{printable(report.path)}: {len(report.kernels)} kernel units for {report.chip}, {size_text(size)}")
        counts = Counter(f"{item.form}, {item.decision.outcome}" for item in report.kernels)
        table(("packed as", "kernels"), [(form, f"{count}") for form, count in counts.items()])
        for name, reason in report.refused.items():
            line(f"  refused {printable(name)}: {reason}")
    if report.refused:
        raise typer.Exit(1)


def show(path: str, list_records: bool, json: bool) -> None:
    """Print what is in a kernel unit."""
    from ingot.ops.ane.kernel import inspect_kernel

    found = inspect_kernel(path)
    if json:
        print_json(found)
        return
    print(f"{found.path}: kernel unit version {found.version} for target {found.target}, {size_text(found.nbytes)}")
    print(
        f"  {shape_text(found.shape)}, kernel format {found.kernel_format} ({found.form}), "
        f"density {found.density:.3g}; {found.groups} groups of up to {found.ocg} channels, "
        f"{found.copies} copies of the tables"
    )
    rows = [(name, *(f"{item[key]}" for key in ("offset", "length", "count", "type", "bits")))
            for name, item in found.sections.items()]  # fmt: skip
    table(("section", "offset", "bytes", "count", "type", "bits"), rows)
    word = f"kernel word {found.word:#010x}" if found.version > 1 else "no kernel word"
    print(f"  {word}; streams beside the weights: {', '.join(found.streams) or 'none'}")
    live = [size for size in found.tiles if size]
    print(f"  weights {len(found.tiles)} tiles, {len(live)} of them used, {min(live)} to {max(live)} bytes")
    if list_records:
        shown = [
            (f"{index}", f"{record[0]}", f"{record[1]}", f"{sum(word == 0xFFFFFFFF for word in record)} of 10")
            for index, record in enumerate(found.records)
        ]
        table(("group", "offset", "channels", "slots at -1"), shown)
