"""``ingot patch``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import Digest, Overwrite, Threads
from ingot.cli.output import Json, print_json, progress_bar, size_text
from ingot.cli.tables import line

if TYPE_CHECKING:
    from ingot.ops.delta.patch import PatchOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot patch ./Llama-3-8B coder.zt -o ./Llama-3-8B-coder\n\n"
    "  ingot patch base.safetensors step1.zt step2.zt step3.zt -o step3.safetensors --verify\n\n"
    "  ingot patch ./base tuned.wdelta -o tuned.safetensors --dtype bf16"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("patch", epilog=EPILOG)(command)


def command(
    base: Annotated[str, typer.Argument(help="The weights that the first delta was made from: file or folder.")],
    deltas: Annotated[list[str], typer.Argument(help="One delta, or several in the order in which they were made.")],
    out: Annotated[
        str, typer.Option("--out", "-o", help="File name with a format's suffix, or a folder (as the base's).")
    ],
    verify_base: Annotated[bool, typer.Option(help="Prove that the base is the right one.")] = True,
    verify: Annotated[bool, typer.Option("--verify", help="Prove the result against what the delta promises.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Element type of the result; default: the fine-tune's.")] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", "-f", help="Target format; default: by the suffix, or the base's."),
    ] = None,
    max_ram: Annotated[str | None, typer.Option(help="Ceiling of anonymous memory, such as 2GiB.")] = None,
    digest: Digest = "crc32c",
    threads: Threads = None,
    overwrite: Overwrite = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")] = False,
    json: Json = False,
) -> None:
    """Turn BASE into the fine-tune that DELTA stands for; several deltas are applied in order.

    A wrong base, or deltas in a wrong order, are refused: nothing appears under OUT.
    """
    from ingot.ops.delta.patch import patch

    options: PatchOptions = {
        "verify_base": verify_base,
        "verify": verify,
        "dtype": dtype,
        "format": format,
        "max_ram": max_ram,
        "digest": None if digest == "none" else digest,
        "threads": threads,
        "overwrite": overwrite,
    }
    with progress_bar("patching", quiet=quiet or json) as progress:
        options["progress"] = progress
        report = patch(base, list(deltas), out, **options)
    if json:
        print_json(dataclasses.asdict(report))
    elif not quiet:
        _print(report)


def _print(report: Any) -> None:
    line(f"{report.base} + {' + '.join(report.deltas)} -> {report.destination} ({report.format})")
    ops = ", ".join(f"{count} {op}" for op, count in report.ops.items()) or "none"
    print(f"  tensors  {report.tensors}: {ops}")
    print(f"  size     {size_text(report.size)}")
    print(f"  time     {report.seconds:.2f} s")
    if report.companions:
        line(f"  with     {', '.join(report.companions)}")
    print(f"  base     {'proven to be the right one' if report.verified_base else 'not checked'}")
    if report.verified:
        print(f"  result   {report.result_id}, as the delta promises")
