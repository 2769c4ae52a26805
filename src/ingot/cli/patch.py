"""``ingot patch``."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import typer

from ingot.cli.derive import derived
from ingot.cli.output import Json, Quiet, print_json, progress_bar, size_text
from ingot.cli.tables import line
from ingot.ops.delta.options import PatchOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot patch ./Llama-3-8B coder.zt -o ./Llama-3-8B-coder\n\n"
    "  ingot patch base.safetensors step1.zt step2.zt step3.zt -o step3.safetensors --verify\n\n"
    "  ingot patch ./base tuned.wdelta -o tuned.safetensors --dtype bf16"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("patch", epilog=EPILOG)(derived(command))


def command(options: PatchOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Turn BASE into the fine-tune that DELTA stands for; several deltas are applied in order.

    A wrong base, or deltas in a wrong order, are refused: nothing appears under OUT.
    """
    from ingot.ops.delta.patch import patch

    with progress_bar("patching", quiet=quiet or json) as progress:
        report = patch(replace(options, progress=progress))
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
