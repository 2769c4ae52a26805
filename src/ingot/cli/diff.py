"""The commands ``ingot diff`` and ``ingot patch``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.core.about import About
from ingot.delta.options import DiffOptions, PatchOptions
from ingot.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from ingot.delta.strategy import RoundingEstimate
    from ingot.reporting.report import Report

EPILOG = (
    "Examples:\n\n"
    "  ingot diff ./Llama-3-8B ./Llama-3-8B-coder -o coder.zt\n\n"
    "  ingot diff base.safetensors tuned.safetensors -o tuned.zt --strategy int4 --max-ram 2GiB\n\n"
    "  ingot diff ./base ./tuned -o tuned.wdelta --strategy int4\n\n"
    "  ingot diff ./step-7 ./step-8 -o step-8.safetensors --strategy sparse-patch"
)


@declare("diff", EPILOG)
def command(
    options: DiffOptions,
    quiet: Quiet = False,
    tensors: Annotated[bool, About("List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Store FINETUNED as a delta to BASE: exactly, or smaller with measured errors.

    The delta identifies its base by content, so that it also applies to a re-sharded or converted copy of the base.
    """
    from ingot.delta.diff import diff

    def print_plan(plan: RoundingEstimate) -> None:
        if not quiet:
            line(plan.describe(), stream=sys.stderr)

    with progress_bar("comparing", quiet=quiet or json) as progress:
        report = diff(replace(options, progress=progress, plan=print_plan))
    render(report.report(tensors=tensors), json=json, quiet=quiet)


PATCH_EPILOG = (
    "Examples:\n\n"
    "  ingot patch ./Llama-3-8B coder.zt -o ./Llama-3-8B-coder\n\n"
    "  ingot patch base.safetensors step1.zt step2.zt step3.zt -o step3.safetensors --verify\n\n"
    "  ingot patch ./base tuned.wdelta -o tuned.safetensors --dtype bf16"
)


@declare("patch", PATCH_EPILOG)
def patch(options: PatchOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Turn BASE into a fine-tune by one DELTA, or by several DELTAs in their order.

    LoRA adapters are merged as `ingot merge` does it. If the base or the order of deltas is wrong, nothing appears
    under OUT.
    """
    from ingot.artifacts.adapter_files import RULE as ADAPTER_RULE
    from ingot.delta.patch import patch as apply_deltas

    with progress_bar("patching", quiet=quiet or json) as progress:
        options = replace(options, progress=progress)
        try:
            report = apply_deltas(options).report()
        except UnsupportedError as error:
            if error.rule != ADAPTER_RULE:
                raise
            report = _merge_adapters(options)
    render(report, json=json, quiet=quiet)


def _merge_adapters(options: PatchOptions) -> Report:
    """Merge the adapters that ``ingot patch`` received instead of deltas; print warnings, return the report.

    Raises ``UsageError`` ``patch.option`` for options that a merge does not have, and the errors of ``ingot.merge``.
    """
    from ingot.cli.convert import warn
    from ingot.conversion.merge import merge
    from ingot.conversion.merge_options import MergeOptions

    defaults = PatchOptions(options.base, options.deltas, options.out)
    for name in ("verify_base", "verify", "dtype", "engine", "address"):
        if getattr(options, name) != getattr(defaults, name):
            raise UsageError(
                f"a LoRA adapter is merged, and a merge has no option --{name.replace('_', '-')}; leave it out",
                rule="patch.option",
            )
    common = ("max_ram", "resume", "overwrite", "progress", "threads", "digest", "drop", "max_decompressed", "io")
    merge_options = MergeOptions(
        options.base,
        options.deltas,
        options.out,
        format=options.format,
        verify=options.check_digests,
        **{name: getattr(options, name) for name in common},
    )
    report = merge(merge_options)
    warn(report.conversion.warnings)
    return report.report()
