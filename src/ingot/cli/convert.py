"""``ingot convert``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from ingot.cli.derive import derived
from ingot.cli.output import Json, Quiet, codec_text, number, print_json, progress_bar, shape_text, size_text
from ingot.cli.tables import equal_layers, line, table
from ingot.ops.convert.options import ConvertOptions

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
    "  ingot convert X.mlpackage Y.mlpackage --recipe ane-m1"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert", epilog=EPILOG)(derived(command))


def command(
    options: ConvertOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which rule hits which tensor and the resulting size; write nothing.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint to another container, by a recipe or as it is, in bounded memory.

    Nothing appears under DST until it is complete.
    """
    if dry_run:
        _dry_run(options, json)
        return
    from ingot.ops.convert.convert import convert

    with progress_bar("converting", quiet=quiet or json) as progress:
        report = convert(replace(options, progress=progress))
    _warn(report.warnings)
    if json:
        print_json(report_data(report))
    elif not quiet:
        print_report(report)


def _dry_run(options: ConvertOptions, json: bool) -> None:
    from ingot.ops.attachments import KINDS
    from ingot.ops.convert.convert import prepare

    with prepare(options) as prepared:
        plan = prepared.plan
        carried = [f"with the {KINDS[kind]}" for kind in plan.options.attachments.kinds()]
        notes = [*carried, *prepared.notes]
        _warn(plan.warnings)
        if json:
            print_json({**_plan_data(plan), "notes": notes, "warnings": plan.warnings})
            return
        elements = max(sum(step.tensor.size for step in plan.steps), 1)
        exactly = "exactly" if plan.size_exact else "at most (as if nothing shrank)"
        line(
            f"{len(plan.steps)} tensors, recipe {plan.recipe}, format {plan.format.name}: {exactly} {plan.size} bytes "
            f"({size_text(plan.size)}), {8 * plan.size / elements:.3f} bits per weight; nothing was written"
        )
        for note in notes:
            line(f"note: {note}")
        print()
        _print_steps(plan.steps)


def _print_steps(steps: Any) -> None:
    """Show what becomes of each tensor, equal layers in one row with the sum of their bytes."""

    def key(step: Any) -> tuple[str, ...]:
        codec = codec_text(step.spec.codec, step.spec.params, _encodings(step.spec))
        return (shape_text(step.tensor.shape), step.tensor.dtype, step.rule, step.action, codec)

    rows = []
    for name, group in equal_layers(steps, lambda step: step.tensor.name, key):
        sizes = (sum(step.in_bytes for step in group), sum(step.out_bytes for step in group))
        rows.append((name, *key(group[0]), f"{len(group)}" if len(group) > 1 else "", *map(size_text, sizes)))
    columns = ("tensor", "shape", "dtype", "rule", "action", "codec", "n", "from", "to")
    table(columns, rows, left=6, optional=("dtype", "shape", "from", "n"))


def _warn(warnings: Sequence[str]) -> None:
    """Tell on stderr what has no effect, whatever stdout is for."""
    for text in warnings:
        line(f"warning: {text}", stream=sys.stderr)


def _encodings(spec: Any) -> list[str]:
    return [part.encoding for part in spec.parts]


def _plan_data(plan: Any) -> dict[str, Any]:
    return {
        "format": plan.format.name,
        "recipe": plan.recipe,
        "size": plan.size,
        "size_exact": plan.size_exact,
        "tensors": [
            {
                "name": step.tensor.name,
                "shape": step.tensor.shape,
                "dtype": step.tensor.dtype,
                "rule": step.rule,
                "action": step.action,
                "exact": step.exact,
                "codec": step.spec.codec,
                "params": step.spec.params,
                "source_nbytes": step.in_bytes,
                "nbytes": step.out_bytes,
            }
            for step in plan.steps
        ],
    }


def report_data(report: Any) -> dict[str, Any]:
    """Return a conversion's report as JSON-like data, computed figures included."""
    import dataclasses

    return {
        **dataclasses.asdict(report),
        "bits_per_weight": report.bits_per_weight,
        "exact": report.exact,
        "sparsity": report.sparsity,
        "actions": report.actions,
    }


def print_report(report: Any) -> None:
    """Print a conversion's summary."""
    actions = ", ".join(f"{count} {action}" for action, count in report.actions.items())
    speed = report.source_nbytes / max(report.seconds, 1e-9)
    line(f"{report.source} -> {report.destination} ({report.format}, recipe {report.recipe})")
    print(
        f"  tensors  {len(report.tensors)}: {actions}"
        + (f"; {report.resumed} from an earlier run" if report.resumed else "")
    )
    print(
        f"  size     {size_text(report.source_size)} -> {size_text(report.size)} "
        f"({100 * report.size / max(report.source_size, 1):.1f} %), {report.bits_per_weight:.3f} bits per weight"
    )
    print(f"  time     {report.seconds:.2f} s, {size_text(int(speed))}/s")
    if report.pruned:
        share = f"{100 * report.sparsity:.1f} % of their weights"
        print(f"  pruned   {len(report.pruned)} tensors, {share}, in whole blocks of channels")
    if report.companions:
        line(f"  with     {', '.join(report.companions)}")
    worst = report.worst
    if report.exact:
        print("  exact    every value is kept bit for bit")
    elif worst is not None:
        error = worst.error
        line(
            f"  error    worst tensor {worst.name}: SNR {number(error['snr_db'])} dB, "
            f"RMS {number(error['rms'])}, max {number(error['max_abs'])}",
        )
        print("           (weight error is not quality: evaluate the model)")
    for note in report.notes:
        line(f"  note     {note}")
