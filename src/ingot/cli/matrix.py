"""The command ``ingot matrix``."""

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
    """Show for every format whether a conversion would copy, repack exactly or decode each tensor, and why.

    Nothing is written. Headers are read; scales and zero points only if the answer depends on them.
    """
    from ingot.conversion.matrix import matrix

    render(matrix(options).report(), json=json)
