"""``ingot diff``."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Annotated, Any

import typer

from ingot.cli.derive import derived
from ingot.cli.output import Json, Quiet, number, print_json, progress_bar, shape_text, size_text
from ingot.cli.tables import line, table
from ingot.ops.delta.options import DiffOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot diff ./Llama-3-8B ./Llama-3-8B-coder -o coder.zt\n\n"
    "  ingot diff base.safetensors tuned.safetensors -o tuned.zt --strategy int4 --max-ram 2GiB\n\n"
    "  ingot diff ./base ./tuned -o tuned.wdelta --strategy int4\n\n"
    "  ingot diff ./step-7 ./step-8 -o step-8.safetensors --strategy sparse-patch"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diff", epilog=EPILOG)(derived(command))


def command(
    options: DiffOptions,
    quiet: Quiet = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Store what turns BASE into FINETUNED: exactly, or smaller and measured.

    The delta names its base by content, so that a re-sharded or converted one is known again.
    """
    from ingot.ops.delta.diff import diff

    with progress_bar("comparing", quiet=quiet or json) as progress:
        report = diff(replace(options, progress=progress))
    if json:
        print_json(
            {
                **dataclasses.asdict(report),
                "share": report.share,
                "exact": report.exact,
                "ops": report.ops,
                "short": [item.name for item in report.short],
            }
        )
    elif not quiet:
        _print(report, tensors)


def _print(report: Any, every: bool) -> None:
    line(f"{report.base} -> {report.tuned}: {report.destination} ({report.format}, strategy {report.strategy})")
    ops = ", ".join(f"{count} {op}" for op, count in report.ops.items()) or "none"
    print(f"  tensors  {len(report.tensors)}: {ops}" + (f"; {len(report.removed)} removed" if report.removed else ""))
    print(f"  size     {size_text(report.size)}, {100 * report.share:.1f} % of the fine-tune")
    print(f"  time     {report.seconds:.2f} s")
    line(f"  base     {report.base_id or 'wdelta:' + str(report.parent_hash)}")
    worst = report.worst
    if report.exact:
        print("  exact    patching gives the fine-tune bit for bit")
    elif worst is not None:
        error = worst.error
        line(
            f"  error    worst tensor {worst.name}: SNR {number(error['snr_db'])} dB, "
            f"RMS {number(error['rms'])}, max {number(error['max_abs'])}",
        )
        print("           (weight error is not quality: evaluate the model)")
    if short := report.short:
        line(
            f"  lost     {len(short)} tensors keep less than half of their difference, worst "
            f"{short[0].name}: {100 * short[0].left:.1f} % left; take a finer strategy"
        )
    if every:
        print()
        print_tensors(report.tensors)


def print_tensors(tensors: Any) -> None:
    """Print what a delta stores of each tensor, and what is lost."""
    rows = [
        (
            item.name,
            shape_text(item.shape),
            item.dtype,
            item.op,
            item.codec,
            size_text(item.nbytes),
            f"{100 * item.nbytes / max(item.tuned_nbytes, 1):.1f} %",
            "exact" if item.exact else number(item.error["rms"]) if item.error else "-",
            "" if item.exact or not item.error else f"{item.error['snr_db']:.2f}",
        )
        for item in tensors
    ]
    table(
        ("tensor", "shape", "dtype", "op", "codec", "stored", "share", "RMS error", "SNR dB"),
        rows,
        left=5,
        optional=("dtype", "shape"),
    )
