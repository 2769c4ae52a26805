"""``ingot diff``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import Digest, Overwrite, Threads
from ingot.cli.output import Json, number, print_json, progress_bar, shape_text, size_text
from ingot.cli.tables import line, table
from ingot.errors import UsageError

if TYPE_CHECKING:
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
    app.command("diff", epilog=EPILOG)(command)


def command(
    base: Annotated[str, typer.Argument(help="The weights that the fine-tune started from: file or folder.")],
    finetuned: Annotated[str, typer.Argument(help="The fine-tune, in any container and layout.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The delta: a name ending in .zt, .wdelta or .safetensors.")],
    strategy: Annotated[
        str, typer.Option(help="How differences are stored: exact, or smaller and not exact (int8, int4, ..., auto).")
    ] = "exact",
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Codec option for the strategy's matrices: NAME=VALUE.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(help="For --strategy auto: the delta's size, such as 200MiB, or a share such as 0.1.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="For --strategy auto: largest error of a difference, as a share of its norm.")
    ] = None,
    max_ram: Annotated[str | None, typer.Option(help="Ceiling of anonymous memory, such as 2GiB.")] = None,
    digest: Digest = "crc32c",
    threads: Threads = None,
    verify: Annotated[bool, typer.Option(help="Check the sources' digests.")] = True,
    measure: Annotated[bool, typer.Option(help="Measure the error of what is not exact.")] = True,
    overwrite: Overwrite = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Store what turns BASE into FINETUNED: exactly, or smaller and measured.

    The delta names its base by content, so that a re-sharded or converted one is known again.
    """
    from ingot.ops.delta.diff import diff

    options: DiffOptions = {
        "options": _options(option or []),
        "target_size": target_size,
        "max_error": max_error,
        "max_ram": max_ram,
        "digest": None if digest == "none" else digest,
        "threads": threads,
        "verify": verify,
        "measure": measure,
        "overwrite": overwrite,
    }
    with progress_bar("comparing", quiet=quiet or json) as progress:
        options["progress"] = progress
        report = diff(base, finetuned, out, strategy, **options)
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


def _options(texts: list[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE``: numbers, true and false as such, anything else as text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"expected --option NAME=VALUE, found {text!r}", rule="cli.option")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
