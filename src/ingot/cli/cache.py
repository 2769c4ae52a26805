"""``ingot cache``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.output import Json, print_json, progress_bar, size_text
from ingot.cli.tables import line, table

if TYPE_CHECKING:
    from ingot.ops.squish.build import BuildReport
    from ingot.ops.squish.status import TierStatus

EPILOG = (
    "Examples:\n\n"
    "  ingot cache status ./model-squish\n\n"
    "  ingot cache build ./model-squish --tier bf16\n\n"
    "  ingot cache build ./model-squish --tier 4bit --max-ram 2GiB\n\n"
    "  ingot cache build ./model-squish --tier 3bit --gate heldout.txt --max-rise 0.02\n\n"
    "  ingot cache drop ./model-squish --tier finalized"
)
Folder = Annotated[str, typer.Argument(help="Squish directory: manifest.json and tensors/.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="The prepared forms (tiers) of a Squish directory.", no_args_is_help=True, epilog=EPILOG)
    group.command("status")(status)
    group.command("build")(build)
    group.command("drop")(drop)
    app.add_typer(group, name="cache")


def status(path: Folder, json: Json = False) -> None:
    """Show which tiers are there, which of them can be trusted, and what would be loaded."""
    from ingot.errors import UsageError
    from ingot.ops.squish.choose import choose
    from ingot.ops.squish.status import status as status_of

    found = status_of(path)
    chosen: dict[str, dict[str, object] | None] = {}
    for title, runtime, packed in (("torch", "torch", False), ("torch, packed", "torch", True), ("mlx", "mlx", False)):
        try:
            chosen[title] = choose(path, runtime, keep_packed=packed).report()
        except UsageError:
            chosen[title] = None
    if json:
        print_json({"path": path, "tiers": found, "loads": chosen})
        return
    rows = [[one.tier, str(one.number), one.state, size_text(one.nbytes), _why(one)] for one in found]
    table(("tier", "number", "state", "size", "why"), rows, left=5)
    for title, choice in chosen.items():
        line(f"{title} loads {choice['tier']}: {choice['why']}" if choice else f"{title} loads none")


def build(
    path: Folder,
    tier: Annotated[str, typer.Option(help="bf16, finalized, 4bit or 3bit.")] = "bf16",
    max_ram: Annotated[str | None, typer.Option(help="Ceiling of anonymous memory, such as 2GiB.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build it anew though it is complete.")] = False,
    gate: Annotated[str | None, typer.Option(help="Text to measure a 4bit or 3bit tier on before it counts.")] = None,
    max_rise: Annotated[float, typer.Option(help="With --gate: by which share the perplexity may rise.")] = 0.02,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")] = False,
    json: Json = False,
) -> None:
    """Build a tier from the tensors; its sentinel is written last.

    A tier that is complete and whose tensors did not change is left as it is. With --gate, which needs the extra
    transformers, tensors that lose most get more bits until the model passes; where none does, the tier is removed.
    """
    from ingot.ops.squish.build import build as build_tier

    measured = None
    if gate is not None:
        from ingot.adapters.gate import PerplexityGate

        measured = PerplexityGate(path, gate, max_rise, max_ram=max_ram)
    with progress_bar(f"building {tier}", quiet=quiet or json) as progress:
        report = build_tier(path, tier, max_ram=max_ram, force=force, gate=measured, progress=progress)
    if json:
        print_json(report)
    elif not quiet:
        what = f"built in {report.seconds:.1f} s" if report.built else "complete already"
        line(f"{report.path}: tier {report.tier}, {size_text(report.nbytes)}, {what}")
        for text in _quality(report):
            line(text)


def _why(one: TierStatus) -> str:
    return "; ".join([one.why, *_quality(one)])


def _quality(one: TierStatus | BuildReport) -> list[str]:
    """Say which tensors have more bits, and what the gate found."""
    lines = []
    if one.raised:
        rest = f" and {len(one.raised) - 3} more" if len(one.raised) > 3 else ""
        lines.append(f"{len(one.raised)} tensors with more bits: {', '.join(one.raised[:3])}{rest}")
    if one.gate is not None:
        rise = f"{100 * one.gate.rise:+.2f} %"
        lines.append(f"perplexity {one.gate.perplexity:.4g} against {one.gate.reference:.4g} ({rise})")
    return lines


def drop(
    path: Folder,
    tier: Annotated[str | None, typer.Option(help="bf16, finalized, 4bit or 3bit; default: all of them.")] = None,
    json: Json = False,
) -> None:
    """Remove built tiers; the tensors they were built from stay."""
    from ingot.ops.squish.build import drop as drop_tiers

    gone = drop_tiers(path, tier)
    if json:
        print_json({"path": path, "dropped": gone})
        return
    for one in gone:
        line(f"{one.path}: tier {one.tier} removed, {size_text(one.nbytes)}")
    if not gone:
        print("no built tier was there")
