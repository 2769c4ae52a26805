"""``ingot compare``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ingot.cli.output import Json, number, print_json, progress_bar, reader_may_leave, size_text
from ingot.cli.tables import line, table

EPILOG = (
    "Examples:\n\n"
    "  ingot compare model.safetensors model-int4.zt\n\n"
    "  ingot compare a.zt b.zt --top 0 --json\n\n"
    "  ingot compare ./base ./tuned --delta tuned.zt"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", epilog=EPILOG)(command)


def command(
    a: Annotated[str, typer.Argument(help="Reference checkpoint.")],
    b: Annotated[str, typer.Argument(help="Checkpoint to compare with it.")],
    delta: Annotated[
        str | None, typer.Option(help="A delta from A: show its size per tensor, and how far A + delta is from B.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Rows to print, worst first; 0 for all.")] = 20,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar; exit code only.")] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: equal, or maximum and RMS error, SNR, cosine; worst first.

    With --delta, A is its base and B the fine-tune. Exit code 0 if all values are equal, 1 if not.
    """
    if delta is not None:
        _cost(a, b, delta, top, quiet, json)
    from ingot.ops.check.compare import compare

    with progress_bar("comparing", quiet=quiet or json) as progress:
        report = compare(a, b, progress=progress)
    with reader_may_leave():  # the exit code is an answer of its own
        if json:
            print_json(
                {"a": report.a, "b": report.b, "same": report.same, "tensors": [_data(item) for item in report.tensors]}
            )
        elif not quiet:
            _print(report, top)
    raise typer.Exit(0 if report.same else 1)


def _cost(base: str, tuned: str, delta: str, top: int, quiet: bool, json: bool) -> None:
    """Show what a delta costs, largest error first."""
    from ingot.cli.diff import print_tensors
    from ingot.ops.delta.cost import delta_cost

    with progress_bar("comparing", quiet=quiet or json) as progress:
        found = delta_cost(base, delta, tuned, progress=progress)
    same = all(item.exact for item in found)
    with reader_may_leave():
        if json:
            print_json({"base": base, "tuned": tuned, "delta": delta, "same": same, "tensors": found})
        elif not quiet:
            ranked = sorted(found, key=lambda item: item.error["snr_db"] if item.error else 1e9)
            print_tensors(ranked[: top or None])
            if top and len(found) > top:
                print(f"... and {len(found) - top} more (--top 0 shows all)")
            stored, whole = sum(item.nbytes for item in found), sum(item.tuned_nbytes for item in found)
            print(
                f"{size_text(stored)} stored, {100 * stored / max(whole, 1):.1f} % of the fine-tune; "
                + ("equal bit for bit" if same else f"{sum(not item.exact for item in found)} tensors are not equal")
            )
    raise typer.Exit(0 if same else 1)


def _data(item: Any) -> dict[str, Any]:
    figures = item.stats.summary() if item.stats else {}
    odd = item.stats.odd if item.stats else 0
    return {"name": item.name, "status": item.status, "detail": item.detail, **figures, "odd": odd}


def _words(status: str, count: int) -> str:
    return status if count == 1 else status.replace("differs", "differ")


def _print(report: Any, top: int) -> None:
    counts: dict[str, int] = {}
    for item in report.tensors:
        counts[item.status] = counts.get(item.status, 0) + 1
    line(", ".join(f"{count} {_words(status, count)}" for status, count in counts.items()) or "no tensors")
    total = report.total
    if report.scored:  # equal tensors beside what could not be compared are no score
        scope = "over all" if report.compared == len(report.tensors) else f"over the {report.compared} compared"
        line(
            f"{scope}: max {number(total.max_abs)}, RMS {number(total.rms)}, SNR {total.snr_db:.2f} dB, "
            f"cosine {total.cosine:.6f}"
        )
    print()
    shown = report.tensors[: top or None]
    rows = []
    for item in shown:
        stats = item.stats
        figures = (
            (number(stats.max_abs), number(stats.rms), f"{stats.snr_db:.2f}", f"{stats.cosine:.6f}")
            if stats
            else ("", "", "", "")
        )
        odd = f"{stats.odd} NaN/Inf mismatches" if stats and stats.odd else ""
        rows.append((item.name, item.status, "; ".join(filter(None, (item.detail, odd))), *figures))
    table(
        ("tensor", "status", "detail", "max error", "RMS error", "SNR dB", "cosine"),
        rows,
        left=3,
        optional=("cosine", "RMS error"),
    )
    if len(shown) < len(report.tensors):
        print(f"... and {len(report.tensors) - len(shown)} more (--top 0 shows all)")
