"""``ingot matrix``."""

from __future__ import annotations

from ingot.cli.declare import declare
from ingot.cli.output import Json
from ingot.cli.render import render
from ingot.conversion.options import MatrixOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot matrix model.gguf\n\n"
    "  ingot matrix ./Llama-3-8B-GPTQ --to gguf --to awq\n\n"
    "  ingot matrix model.zt --json     (with every tensor)"
)


@declare("matrix", EPILOG)
def command(options: MatrixOptions, json: Json = False) -> None:
    """Show for every format what a conversion would keep: what is moved, repacked exactly or decoded, and why.

    Writes nothing. Reads headers, and scales and zero points where only they tell.
    """
    from ingot.conversion.matrix import matrix

    render(matrix(options).report(), json=json)
