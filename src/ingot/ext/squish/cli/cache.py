"""``ingot cache``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ingot.cli.declare import declare
from ingot.cli.help import Group
from ingot.cli.output import Json, Quiet, progress_bar, render
from ingot.core.about import About
from ingot.ext.squish.tiers.options import BuildOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot cache status ./model-squish\n\n"
    "  ingot cache build ./model-squish --tier bf16\n\n"
    "  ingot cache build ./model-squish --tier 4bit --max-ram 2GiB\n\n"
    "  ingot cache build ./model-squish --tier 3bit --gate heldout.txt --max-rise 0.02\n\n"
    "  ingot cache drop ./model-squish --tier finalized"
)
Folder = Annotated[str, About("Squish directory: manifest.json and tensors/.", reads=True, argument=True)]


@declare("status")
def status(path: Folder, json: Json = False) -> None:
    """Show which tiers exist, which are complete and current, and which tier each runtime would load."""
    from ingot.errors import UsageError
    from ingot.ext.squish.tiers.choose import choose
    from ingot.ext.squish.tiers.status import status as status_of
    from ingot.ext.squish.tiers.status import status_report

    tiers = status_of(path)
    chosen: dict[str, dict[str, object] | None] = {}
    for title, runtime, packed in (("torch", "torch", False), ("torch, packed", "torch", True), ("mlx", "mlx", False)):
        try:
            chosen[title] = choose(path, runtime, keep_packed=packed).report()
        except UsageError:
            chosen[title] = None
    render(status_report(path, tiers, chosen), json=json)


@declare("build")
def build(
    options: BuildOptions,
    gate: Annotated[
        str | None,
        About("Text on which a 4bit or 3bit tier is measured before use; Ingot has a default text for 3bit."),
    ] = None,
    max_rise: Annotated[float, About("Limit on the relative rise of the perplexity at a gate.")] = 0.02,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Build a tier from the tensors; its sentinel is written last.

    A complete tier whose source tensors did not change is not built again. A gate needs the extra transformers. It
    gives more bits to the tensors with the largest errors until the model passes; if no choice passes, the tier is
    removed.
    """
    from ingot.ext.squish.tiers.build import build as build_tier
    from ingot.ext.squish.tiers.status import is_built

    by_default = options.tier == "3bit" and not options.ungated
    if gate is not None or (by_default and (options.force or not is_built(options.path, "3bit"))):
        from ingot.ext.squish.gate import TEXT, PerplexityGate

        measured = PerplexityGate(options.path, gate or TEXT, max_rise, max_ram=options.max_ram)
        options = replace(options, gate=measured)
    with progress_bar(f"building {options.tier}", quiet=quiet or json) as progress:
        report = build_tier(replace(options, progress=progress))
    render(report.report(), json=json, quiet=quiet)


@declare("drop")
def drop(
    path: Folder,
    tier: Annotated[str | None, About("bf16, finalized, 4bit or 3bit; by default all.")] = None,
    json: Json = False,
) -> None:
    """Remove built tiers; the source tensors stay."""
    from ingot.ext.squish.tiers.build import drop as drop_tiers
    from ingot.ext.squish.tiers.status import dropped_report

    render(dropped_report(path, drop_tiers(path, tier)), json=json)


command = Group(
    "cache",
    commands=[status, build, drop],
    help="Build, show and remove the tiers of a Squish directory: prepared copies of its weights.",
    no_args_is_help=True,
    epilog=EPILOG,
)
