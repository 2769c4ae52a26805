"""``ingot diff``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.core.options import About
from ingot.delta.options import DiffOptions

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
    """Store what turns BASE into FINETUNED: exactly, or smaller and measured.

    The delta names its base by content, so that a re-sharded or converted one is known again.
    """
    from ingot.delta.diff import diff

    def say(plan: RoundingEstimate) -> None:
        if not quiet:
            line(plan.describe(), stream=sys.stderr)

    with progress_bar("comparing", quiet=quiet or json) as progress:
        report = diff(replace(options, progress=progress, plan=say))
    render(report.report(tensors=tensors), json=json, quiet=quiet)
