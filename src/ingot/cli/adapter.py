"""The command ``ingot adapter``."""

from __future__ import annotations

from dataclasses import replace

from ingot.adapters.options import AdapterConvertOptions, AdapterExtractOptions
from ingot.cli.convert import warn
from ingot.cli.declare import declare
from ingot.cli.help import Group
from ingot.cli.output import Json, Quiet, progress_bar, render

EPILOG = (
    "Examples:\n\n"
    "  ingot adapter convert ./my-lora --base ./Llama-3-8B -o my-lora.gguf\n\n"
    "  ingot adapter convert ./my-lora -o ./my-lora-mlx --to mlx\n\n"
    "  ingot adapter extract ./Llama-3-8B ./my-tune -o ./my-lora --rank 32"
)

CONVERT_EPILOG = (
    "Examples:\n\n"
    "  ingot adapter convert ./my-lora --base ./Llama-3-8B -o my-lora.gguf\n\n"
    "  ingot adapter convert my-lora.gguf --base ./Llama-3-8B -o ./my-lora"
)
EXTRACT_EPILOG = (
    "Examples:\n\n"
    "  ingot adapter extract ./Llama-3-8B ./my-tune -o ./my-lora --rank 32\n\n"
    "  ingot adapter extract ./Llama-3-8B ./my-tune -o ./my-lora --size 100MB --dtype bf16\n\n"
    "  ingot adapter extract ./Llama-3-8B ./my-tune -o ./my-lora --residual exact"
)


@declare("convert", CONVERT_EPILOG)
def convert(options: AdapterConvertOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write an adapter for PEFT, llama.cpp (GGUF) or mlx_lm, with the same values.

    The base determines the names and the order of rows in GGUF.
    """
    from ingot.adapters.convert import convert_adapter

    render(convert_adapter(options).report(), json=json, quiet=quiet)


@declare("extract", EXTRACT_EPILOG)
def extract(options: AdapterExtractOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write a LoRA adapter (PEFT) that approximates a full fine-tune with the least error.

    Changed tensors that a LoRA adapter cannot contain are listed.
    """
    from ingot.delta.extract_adapter import extract_adapter

    with progress_bar("extracting", quiet=quiet or json) as progress:
        report = extract_adapter(replace(options, progress=progress))
    warn(report.warnings)
    render(report.report(), json=json, quiet=quiet)


command = Group(
    "adapter",
    commands=[convert, extract],
    help="LoRA adapters: write them for another program, extract them from a fine-tune.",
    no_args_is_help=True,
    epilog=EPILOG,
)
