"""``ingot eval``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, print_json, progress_bar, render
from ingot.core.about import About
from ingot.runtime.loading.options import Loading, Measures, Protocol

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
