"""``ingot report``."""

from __future__ import annotations

from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar
from ingot.cli.render import render
from ingot.errors import UsageError
from ingot.inspect.page.options import ReportOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot report model.zt -o model.html\n\n"
    "  ingot report ./Llama-3-8B ./Llama-3-8B-int4 -o int4.html\n\n"
    "  ingot report ./base ./tuned -o tuned.html --eval base.json --eval tuned.json\n\n"
    "  ingot report ./base ./tuned --json"
)


@declare("report", EPILOG)
def command(options: ReportOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Show what a checkpoint is made of, and how far B is from A, as a page to look at in a browser.

    One file that asks for nothing on any network: bytes by layer and role, errors by tensor and layer, values with the
    grid of their codes, evaluations beside each other.
    """
    if options.out is None and not json:
        raise UsageError("expected the page to write (--out NAME.html), or --json, found neither", rule="report.page")
    from ingot.inspect.page.report import report

    with progress_bar("comparing", quiet=quiet or json) as progress:
        found = report(replace(options, progress=progress))
    render(found, json=json, quiet=quiet)
