"""The commands ``ingot convert``, ``ingot append``, ``ingot run-plan`` and ``ingot merge``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ingot.artifacts.destination import LIMITS
from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.conversion.merge_options import MergeOptions
from ingot.conversion.options import ConvertOptions, ExecuteOptions
from ingot.core.about import About
from ingot.stores.location import require_local

if TYPE_CHECKING:
    from ingot.conversion.estimate import Estimate

EPILOG = (
    "Examples:\n\n"
    "  ingot convert model.safetensors model.zt --recipe int4\n\n"
    "  ingot convert ./Llama-3-8B ./Llama-3-8B-int8 --recipe int8 --max-ram 2GiB --resume\n\n"
    "  ingot convert model.zt back.safetensors\n\n"
    "  ingot convert ./Llama-3-8B out.zt --recipe my-recipe.toml --dry-run\n\n"
    "  ingot convert ./Llama-3-8B model.squizd --recipe int2-hybrid --draft ./EAGLE3-head --coreml X.mlpackage\n\n"
    "  ingot convert ./Llama-3-8B pruned.zt --recipe int4 --prune 0.1 --activations norms.safetensors\n\n"
    "  ingot convert ./Llama-3-8B ./Llama-3-8B-squish --format npydir --recipe squish-int8\n\n"
    "  ingot convert ./Llama-3-8B ./Llama-3-8B-mlx --format mlx --recipe mlx-4bit\n\n"
    "  ingot convert ./Llama-3-8B model.gguf --target-size 4.1GiB --types q3_k,q4_k,q6_k\n\n"
    "  ingot convert ./Llama-3-8B model.gguf --max-kl 0.02 --text heldout.txt\n\n"
    "  ingot convert X.mlpackage Y.mlpackage --recipe ane-m1"
)


@declare("convert", EPILOG)
def command(
    options: ConvertOptions,
    dry_run: Annotated[bool, About("Show the effect of each rule and the size; write nothing.")] = False,
    plan_out: Annotated[
        str | None,
        About("Write the plan as JSON to this file, for `ingot run-plan`; convert nothing.", panel=LIMITS),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint to another container in bounded memory; a recipe can quantize it.

    Nothing appears under DST until it is complete.
    """
    if dry_run or plan_out is not None:
        _dry_run(options, plan_out, quiet=quiet or not dry_run, json=json)
        return
    from ingot.conversion.run import convert

    def announce(estimate: Estimate) -> None:
        if not quiet:
            line(f"estimate: {estimate.describe()}", stream=sys.stderr)

    with progress_bar("converting", quiet=quiet or json) as progress:
        report = convert(replace(options, progress=progress, announce=announce))
    warn(report.warnings)
    render(report.report(), json=json, quiet=quiet)


def _dry_run(options: ConvertOptions, plan_out: str | None, *, quiet: bool, json: bool) -> None:
    from ingot.conversion.planfile import save_plan
    from ingot.conversion.run import prepare

    with prepare(options) as prepared:
        if plan_out is not None:
            save_plan(prepared, options, plan_out)
        warn(prepared.plan.warnings)
        render(prepared.report(), json=json, quiet=quiet)


def warn(warnings: Sequence[str]) -> None:
    """Print warnings on stderr, even with ``--quiet`` or ``--json``."""
    for text in warnings:
        line(f"warning: {text}", stream=sys.stderr)


RUN_PLAN_EPILOG = (
    "Examples:\n\n"
    "  ingot convert ./Llama-3-8B out.zt --recipe int4 --plan-out plan.json\n\n"
    "  ingot run-plan plan.json --max-ram 2GiB --resume"
)


@declare("run-plan", RUN_PLAN_EPILOG)
def run_plan(options: ExecuteOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Carry out a plan that `ingot convert --plan-out` wrote, here or on another machine with the same files.

    The result has the same bytes as that of `ingot convert`.
    """
    from ingot.conversion.execute_plan import execute

    with progress_bar("converting", quiet=quiet or json) as progress:
        report = execute(replace(options, progress=progress))
    render(report.report(), json=json, quiet=quiet)


APPEND_EPILOG = (
    "Examples:\n\n"
    "  ingot append model.zt extra.safetensors\n\n"
    "  ingot convert old.zt model.zt --container 2     (files of container 1 cannot be extended)"
)


@declare("append", APPEND_EPILOG)
def append(
    path: Annotated[str, About("The .zt file of container 2 to extend.", reads=True, argument=True, metavar="FILE")],
    src: Annotated[str, About("Checkpoint whose tensors are added as they are stored.", reads=True, argument=True)],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Add the tensors of a checkpoint to a .zt file without rewriting it.

    A run that is killed leaves the old tensors. Names must be new.
    """
    from ingot.artifacts.append import append as append_tensors
    from ingot.artifacts.open import open as open_checkpoint

    with open_checkpoint(src) as checkpoint:
        appended = append_tensors(path, checkpoint)
    render(appended.report(), json=json, quiet=quiet)


_WEIGHT = re.compile(r"(?<=.):[-+]?[0-9.]+(e[-+]?[0-9]+)?$", re.IGNORECASE)  # the weight in PATH:WEIGHT
MERGE_EPILOG = (
    "Examples:\n\n"
    "  ingot merge ./Llama-3-8B ./my-lora -o ./Llama-3-8B-mine\n\n"
    "  ingot merge ./Llama-3-8B ./style:0.7 ./facts:0.3 -o mixed.gguf --type Q4_K_M\n\n"
    "  ingot merge model-Q4_K_M.gguf ./my-lora -o mine-Q4_K_M.gguf\n\n"
    "  ingot merge ./Llama-3-8B ./my-lora -o ./mine-w4a16 --for vllm --recipe w4a16 --max-ram 2GiB --resume\n\n"
    "  ingot merge ./Llama-3-8B ./code ./chat:0.5 -o ./both --method ties --density 0.3\n\n"
    "  ingot merge ./first:0.7 ./second:0.3 -o ./between --method slerp"
)


@declare("merge", MERGE_EPILOG)
def merge(options: MergeOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Merge LoRA adapters into their base, or models with --method, in bounded memory.

    Adapters are PEFT or MLX folders, or GGUF files. Models may be quantized, or deltas of the base.
    Nothing appears under OUT until it is complete.
    """
    operands = options.operands if isinstance(options.operands, Sequence) else [options.operands]
    for operand in map(str, (options.base, *operands)):
        if not Path(operand).exists():  # an existing path may end like a weight
            require_local(_WEIGHT.sub("", operand))  # before the import below, which takes a second
    from ingot.conversion.merge import merge as merge_operands

    with progress_bar("merging", quiet=quiet or json) as progress:
        report = merge_operands(replace(options, progress=progress))
    warn(report.conversion.warnings)
    render(report.report(), json=json, quiet=quiet)
