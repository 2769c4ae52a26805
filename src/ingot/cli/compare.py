"""The commands ``ingot compare`` and ``ingot report``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar, render
from ingot.core.about import About
from ingot.errors import UsageError
from ingot.inspect.options import CompareOptions
from ingot.inspect.page.options import ReportOptions

if TYPE_CHECKING:
    from ingot.reporting.report import Report

EPILOG = (
    "Examples:\n\n"
    "  ingot compare model.safetensors model-int4.zt\n\n"
    "  ingot compare a.zt b.zt --top 0 --json\n\n"
    "  ingot compare ./base ./tuned --delta tuned.zt\n\n"
    "  ingot compare s3://bucket/model s3://bucket/small --engine ray"
)


@declare("compare", EPILOG)
def command(
    options: CompareOptions,
    delta: Annotated[
        str | None, About("A delta from A: show its size per tensor, and how far A + delta is from B.")
    ] = None,
    top: Annotated[int, About("Rows to print, worst first; 0 for all.", metavar="N", minimum=0)] = 20,
    quiet: Annotated[bool, About("No progress bar; exit code only.", ("--quiet", "-q"))] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: equal, or maximum and RMS error, SNR, cosine; worst first.

    With --delta, A is its base and B the fine-tune. Exit code 0 if all values are equal, 1 if not.
    """
    if delta is not None:
        same, shown = _delta_cost(options, delta, top, quiet=quiet or json)
    else:
        same, shown = _compare(options, top, quiet=quiet or json)
    render(shown, json=json, quiet=quiet)
    raise Exit(0 if same else 1)


def _compare(options: CompareOptions, top: int, *, quiet: bool) -> tuple[bool, Report]:
    from ingot.inspect.compare import compare

    with progress_bar("comparing", quiet=quiet) as progress:
        report = compare(replace(options, progress=progress))
    return report.same, report.report(top)


def _delta_cost(options: CompareOptions, delta: str, top: int, *, quiet: bool) -> tuple[bool, Report]:
    """Return whether a delta is exact, and a report of its sizes and errors, largest error first."""
    from ingot.delta.cost import cost_report, delta_cost

    with progress_bar("comparing", quiet=quiet) as progress:
        costs = delta_cost(
            options.a,
            delta,
            options.b,
            max_decompressed=options.max_decompressed,
            progress=progress,
            engine=options.engine,
            address=options.address,
        )
    return all(item.exact for item in costs), cost_report(options.a, delta, options.b, costs, top)


REPORT_EPILOG = (
    "Examples:\n\n"
    "  ingot report model.zt -o model.html\n\n"
    "  ingot report ./Llama-3-8B ./Llama-3-8B-int4 -o int4.html\n\n"
    "  ingot report ./base ./tuned -o tuned.html --eval base.json --eval tuned.json\n\n"
    "  ingot report ./base ./tuned --json"
)


@declare("report", REPORT_EPILOG)
def report(options: ReportOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write an HTML page that shows the contents of a checkpoint, and the errors of B against A.

    The page is one file that loads nothing from a network. It shows bytes by layer and role, errors by tensor and
    layer, values with the grid of their codes, and evaluations side by side.
    """
    if options.out is None and not json:
        raise UsageError("expected the page to write (-o NAME.html), or --json, found neither", rule="report.page")
    from ingot.inspect.page.report import report as write_page

    with progress_bar("comparing", quiet=quiet or json) as progress:
        contents = write_page(replace(options, progress=progress))
    render(contents, json=json, quiet=quiet)
