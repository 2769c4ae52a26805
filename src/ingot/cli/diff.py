"""``ingot diff`` and ``ingot patch``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Annotated

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.core.options import About
from ingot.delta.options import DiffOptions, PatchOptions
from ingot.errors import UsageError
from ingot.stores.location import AnyPath, Location

if TYPE_CHECKING:
    from ingot.delta.strategy import RoundingEstimate

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
    """Turn BASE into a fine-tune by one DELTA, or by several in the given order. Adapters are merged.

    A wrong base and a wrong order of deltas are errors; then nothing appears under OUT.
    """
    from ingot.adapters.read import is_adapter
    from ingot.delta.patch import patch as apply_deltas

    deltas = options.deltas
    chain = [deltas] if isinstance(deltas, str | PathLike | Location) else list(deltas)
    if chain and all(is_adapter(item) for item in chain):
        _merge(options, chain, quiet=quiet, json=json)
        return
    with progress_bar("patching", quiet=quiet or json) as progress:
        report = apply_deltas(replace(options, progress=progress))
    render(report.report(), json=json, quiet=quiet)


def _merge(options: PatchOptions, adapters: Sequence[AnyPath], *, quiet: bool, json: bool) -> None:
    """Merge adapters, which are deltas too, with the options of a patch; see ``ingot merge``."""
    from ingot.conversion.merge import merge
    from ingot.conversion.merge_options import MergeOptions

    if options.dtype is not None or options.engine != "local":
        raise UsageError("expected no --dtype and no --engine with an adapter: use ingot merge", rule="patch.option")
    with progress_bar("merging", quiet=quiet or json) as progress:
        merged = merge(
            MergeOptions(
                options.base,
                adapters,
                options.out,
                format=options.format,
                max_ram=options.max_ram,
                resume=options.resume,
                overwrite=options.overwrite,
                progress=progress,
                threads=options.threads,
                digest=options.digest,
                drop=options.drop,
                verify=options.check_digests,
                max_decompressed=options.max_decompressed,
                io=options.io,
            )
        )
    render(merged.report(), json=json, quiet=quiet)
