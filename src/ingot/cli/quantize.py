"""The command ``ingot quantize``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.core.about import About
from ingot.runtime.quantize.options import NONE, QuantizeOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot quantize ./Llama-3-8B -o ./Llama-3-8B-w4 --for vllm\n\n"
    "  ingot quantize ./Llama-3-8B -o model.gguf --type Q4_0\n\n"
    "  ingot quantize ./Llama-3-8B -o ./Llama-3-8B-mlx --for mlx --bits 4 --calibration none\n\n"
    "  ingot quantize ./Llama-3-8B -o model.gguf --bits 4 --time 30m\n\n"
    "  ingot quantize ./Llama-3-8B -o out --for vllm --dry-run"
)


@declare("quantize", EPILOG)
def command(
    options: QuantizeOptions,
    dry_run: Annotated[
        bool, About("Print the decision for each tensor, and the estimated time and memory; write nothing.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Quantize a model for a program; --for alone decides container and preset.

    At the end the result is checked for that program; size, error and the command that runs it are printed.
    """
    from ingot.runtime.quantize.checks import check_options

    check_options(options)  # before the imports below, which take half a second

    from ingot.conversion.estimate import Estimate
    from ingot.runtime.quantize.report import with_estimate
    from ingot.runtime.quantize.run import prepare, quantize

    if str(options.calibration) != NONE and not quiet and sys.stderr.isatty():  # 135 M weights take half a minute
        line("estimating time and memory ...", stream=sys.stderr)
    if dry_run:
        prepared, estimate = prepare(options)
        with prepared:
            render(with_estimate(prepared.report(), estimate), json=json, quiet=quiet)
        return

    def announce(estimate: Estimate) -> None:
        if not quiet:
            line(f"estimate: {estimate.describe()}, calibration {estimate.mode}", stream=sys.stderr)

    def confirm(estimate: Estimate) -> bool:
        question = f"Calibrate ({estimate.mode}) for {estimate.describe()}? If not, a faster mode is used [Y/n] "
        sys.stderr.write(question)
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("", "y", "yes")

    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (quiet or json)
    with progress_bar("quantizing", quiet=quiet or json) as progress:
        report = quantize(replace(options, progress=progress, announce=announce, confirm=confirm if asks else None))
    for text in report.warnings:
        line(f"warning: {text}", stream=sys.stderr)
    render(report.report(), json=json, quiet=quiet)
