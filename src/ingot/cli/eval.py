"""The commands ``ingot eval`` and ``ingot sweep``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, print_json, progress_bar, render
from ingot.core.about import About
from ingot.runtime.loading.options import Loading, Measures, Protocol
from ingot.runtime.sweep.options import SweepOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot eval ./Llama-3-8B --text heldout.txt\n\n"
    "  ingot eval ./packed --text heldout.txt --reference ./Llama-3-8B --keep-packed\n\n"
    "  ingot eval ./packed --text heldout.txt --reference ./Llama-3-8B --gate 'kl<0.02,ppl<1.01x' --receipt\n\n"
    "  ingot eval model.gguf --text heldout.txt --reference ./Llama-3-8B --arithmetic llama.cpp\n\n"
    "  ingot eval model.zt --text heldout.txt --window 512 --sequences 32 --json"
)


@declare("eval", EPILOG)
def command(
    *,
    model: Annotated[
        str, About("Folder or file, with config.json and tokenizer beside the weights.", reads=True, argument=True)
    ],
    text: Annotated[str, About("Text file in UTF-8 that the model was not trained on.", reads=True)],
    reference: Annotated[str | None, About("Model to compare the predictions with.", reads=True)] = None,
    measures: Measures,
    protocol: Protocol,
    loading: Loading,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure a model on a text: perplexity, speed, memory; with --reference also KL and top-1 agreement.

    Figures have 95 % intervals from a bootstrap over windows. Exit code 1 if the model fails --gate.
    Needs the extra transformers.
    """
    from ingot.runtime.evaluation.evaluate import evaluate

    with progress_bar("evaluating", quiet=quiet or json) as progress:
        result = evaluate(model, text, reference, protocol, loading, replace(measures, progress=progress))
    if json:
        print_json(result)
    else:
        render(result.report(), quiet=quiet)
    raise Exit(0 if result.met else 1)


SWEEP_EPILOG = (
    "Examples:\n\n"
    "  ingot sweep ./Llama-3-8B --presets q4_0,q4_0-calibrated,Q4_K_M --texts prose.txt,code.txt -o sweep.json\n\n"
    "  ingot sweep ./Llama-3-8B --presets int4,int3-calibrated --texts prose.txt -o sweep.json --page sweep.md\n\n"
    "  ingot sweep ./Llama-3-8B --for vllm --presets w4a16,w4a16-calibrated --texts prose.txt -o sweep.json --resume"
)


@declare("sweep", SWEEP_EPILOG)
def sweep(options: SweepOptions, protocol: Protocol, quiet: Quiet = False, json: Json = False) -> None:
    """Quantize a model with several presets and measure each: KL divergence from the model, perplexity, size, time.

    Statistics are collected once, and the model reads each text once. Needs the extra transformers.
    """
    from ingot.runtime.sweep.checks import check_options

    check_options(options)  # before the imports below, which take seconds

    from ingot.runtime.sweep.run import sweep as run_sweep

    def announce(text: str) -> None:
        if not quiet:
            line(text, stream=sys.stderr)

    with progress_bar("sweeping", quiet=quiet or json) as progress:
        report = run_sweep(replace(options, protocol=protocol, progress=progress, announce=announce))
    render(report.report(), json=json, quiet=quiet)
