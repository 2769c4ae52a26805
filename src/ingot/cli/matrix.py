"""``ingot matrix``."""

from __future__ import annotations

from ingot.cli.declare import declare
from ingot.cli.output import Json, render
from ingot.conversion.options import MatrixOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot matrix model.gguf\n\n"
    "  ingot matrix ./Llama-3-8B-GPTQ --to gguf --to awq\n\n"
    "  ingot matrix model.zt --json     (with every tensor)"
)


@declare("matrix", EPILOG)
def command(options: MatrixOptions, json: Json = False) -> None:
    """Show for every format how a conversion would treat each tensor: move, repack exactly or decode it, and why.

    Writes nothing. Reads headers, and scales and zero points if the answer depends on them.
    """
    from ingot.conversion.matrix import matrix

    render(matrix(options).report(), json=json)
