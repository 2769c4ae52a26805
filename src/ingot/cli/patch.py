"""``ingot patch``."""

from __future__ import annotations

from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar
from ingot.cli.render import render
from ingot.delta.options import PatchOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot patch ./Llama-3-8B coder.zt -o ./Llama-3-8B-coder\n\n"
    "  ingot patch base.safetensors step1.zt step2.zt step3.zt -o step3.safetensors --verify\n\n"
    "  ingot patch ./base tuned.wdelta -o tuned.safetensors --dtype bf16"
)


@declare("patch", EPILOG)
def command(options: PatchOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Turn BASE into the fine-tune that DELTA stands for; several deltas are applied in order.

    A wrong base, or deltas in a wrong order, are refused: nothing appears under OUT.
    """
    from ingot.delta.patch import patch

    with progress_bar("patching", quiet=quiet or json) as progress:
        report = patch(replace(options, progress=progress))
    render(report.report(), json=json, quiet=quiet)
