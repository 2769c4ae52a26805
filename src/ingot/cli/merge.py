"""``ingot merge`` and ``ingot adapter``."""

from __future__ import annotations

from dataclasses import replace

from ingot.adapters.options import AdapterConvertOptions
from ingot.cli.convert import warn
from ingot.cli.declare import declare
from ingot.cli.help import Group
from ingot.cli.output import Json, Quiet, progress_bar, render
from ingot.conversion.merge_options import MergeOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot merge ./Llama-3-8B ./my-lora -o ./Llama-3-8B-mine\n\n"
    "  ingot merge ./Llama-3-8B ./style:0.7 ./facts:0.3 -o mixed.gguf --type Q4_K_M\n\n"
    "  ingot merge model-Q4_K_M.gguf ./my-lora -o mine-Q4_K_M.gguf\n\n"
    "  ingot merge ./Llama-3-8B ./my-lora -o ./mine-w4a16 --for vllm --recipe w4a16 --max-ram 2GiB --resume"
)


@declare("merge", EPILOG)
def command(options: MergeOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Merge LoRA adapters into their base, which may be quantized, in bounded memory.

    Adapters are PEFT or MLX folders, or GGUF adapters. Nothing appears under OUT until it is complete.
    """
    from ingot.conversion.merge import merge

    with progress_bar("merging", quiet=quiet or json) as progress:
        report = merge(replace(options, progress=progress))
    warn(report.conversion.warnings)
    render(report.report(), json=json, quiet=quiet)


ADAPTER_EPILOG = (
    "Examples:\n\n"
    "  ingot adapter convert ./my-lora --base ./Llama-3-8B -o my-lora.gguf\n\n"
    "  ingot adapter convert ./my-lora -o ./my-lora-mlx --to mlx\n\n"
    "  ingot adapter convert my-lora.gguf --base ./Llama-3-8B -o ./my-lora"
)


@declare("convert")
def convert(options: AdapterConvertOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write an adapter in the form of PEFT, of llama.cpp (GGUF) or of mlx_lm, with the same values."""
    from ingot.adapters.convert import convert_adapter

    render(convert_adapter(options).report(), json=json, quiet=quiet)


adapter = Group(
    "adapter",
    commands=[convert],
    help="LoRA adapters: write them for another program.",
    no_args_is_help=True,
    epilog=ADAPTER_EPILOG,
)
