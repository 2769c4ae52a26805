"""``ingot adapter``."""

from __future__ import annotations

from ingot.adapters.options import AdapterConvertOptions
from ingot.cli.declare import declare
from ingot.cli.help import Group
from ingot.cli.output import Json, Quiet, render

EPILOG = (
    "Examples:\n\n"
    "  ingot adapter convert ./my-lora --base ./Llama-3-8B -o my-lora.gguf\n\n"
    "  ingot adapter convert ./my-lora -o ./my-lora-mlx --to mlx\n\n"
    "  ingot adapter convert my-lora.gguf --base ./Llama-3-8B -o ./my-lora"
)

CONVERT_EPILOG = (
    "Examples:\n\n"
    "  ingot adapter convert ./my-lora --base ./Llama-3-8B -o my-lora.gguf\n\n"
    "  ingot adapter convert ./my-lora-mlx -o ./my-lora --to peft"
)


@declare("convert", CONVERT_EPILOG)
def convert(options: AdapterConvertOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write an adapter in the form of PEFT, of llama.cpp (GGUF) or of mlx_lm, with the same values.

    The base determines the names and the order of rows in GGUF.
    """
    from ingot.adapters.convert import convert_adapter

    render(convert_adapter(options).report(), json=json, quiet=quiet)


command = Group(
    "adapter",
    commands=[convert],
    help="LoRA adapters: write them for another program.",
    no_args_is_help=True,
    epilog=EPILOG,
)
