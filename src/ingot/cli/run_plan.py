"""``ingot run-plan``."""

from __future__ import annotations

from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar
from ingot.cli.render import render
from ingot.conversion.options import ExecuteOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot convert ./Llama-3-8B out.zt --recipe int4 --plan-out plan.json\n\n"
    "  ingot run-plan plan.json --max-ram 2GiB --resume"
)


@declare("run-plan", EPILOG)
def command(options: ExecuteOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Carry out a plan that `ingot convert --plan-out` wrote, here or on another machine that sees the same files.

    The result is byte for byte that of the conversion itself.
    """
    from ingot.conversion.execute_plan import execute

    with progress_bar("converting", quiet=quiet or json) as progress:
        report = execute(replace(options, progress=progress))
    render(report.report(), json=json, quiet=quiet)
