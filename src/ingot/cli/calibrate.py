"""The command ``ingot calibrate``."""

from __future__ import annotations

import sys
from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.runtime.calibration.calibration import CalibrateOptions, CalibratePlan

EPILOG = (
    "Examples:\n\n"
    "  ingot calibrate ./Llama-3-8B -o statistics.safetensors\n\n"
    "  ingot convert ./Llama-3-8B model.gguf --recipe q4_0-calibrated --calibration statistics.safetensors"
)


@declare("calibrate", EPILOG)
def command(options: CalibrateOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Collect statistics of the inputs of a model's matrices, for recipes with a quantizer; no text is needed.

    Needs the extra transformers.
    """
    from ingot.runtime.calibration.calibrate import calibrate

    def print_plan(plan: CalibratePlan) -> None:
        if not quiet:
            line(f"calibrating takes {plan.describe()}", stream=sys.stderr)

    with progress_bar("calibrating", quiet=quiet or json) as progress:
        result = calibrate(replace(options, progress=progress, plan=print_plan))
    render(result.report(), json=json, quiet=quiet)
