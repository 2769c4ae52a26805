"""``ingot seal``."""

from __future__ import annotations

from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar
from ingot.cli.render import render
from ingot.inspect.options import SealOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot seal model.safetensors\n\n"
    "  ingot verify --repair --from https://host/model.safetensors model.safetensors"
)


@declare("seal", EPILOG)
def command(options: SealOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write digests of a checkpoint's files beside them (X.ingot.json), for containers that have none of their own.

    Readers from afar prove each chunk by them as it comes, verify checks them, verify --repair puts right what differs.
    """
    from ingot.inspect.seal import seal, sealed_report

    with progress_bar("sealing", quiet=quiet or json) as progress:
        written = seal(replace(options, progress=progress))
    render(sealed_report(written), json=json, quiet=quiet)
