"""``ingot eval``."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.adapters.options import Loading, Protocol
from ingot.cli.derive import derived
from ingot.cli.output import Json, number, print_json, size_text
from ingot.cli.tables import table

EPILOG = (
    "Examples:\n\n"
    "  ingot eval ./Llama-3-8B --text heldout.txt\n\n"
    "  ingot eval ./packed --text heldout.txt --reference ./Llama-3-8B --keep-packed\n\n"
    "  ingot eval model.zt --text heldout.txt --window 512 --sequences 32 --json"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval", epilog=EPILOG)(derived(command))


def command(
    *,
    model: Annotated[str, typer.Argument(help="Folder or file, with config.json and tokenizer beside the weights.")],
    text: Annotated[str, typer.Option(help="Text file in UTF-8 that the model was not trained on.")],
    reference: Annotated[str | None, typer.Option(help="Model to compare the predictions with.")] = None,
    protocol: Protocol,
    loading: Loading,
    json: Json = False,
) -> None:
    """Measure a model on a text: perplexity, speed, memory; with --reference also KL and top-1 agreement.

    Needs the extra transformers.
    """
    from ingot.adapters.evaluate import evaluate

    result = evaluate(model, text, reference, protocol, loading)
    if json:
        print_json(result)
        return
    rows = [
        ("perplexity", f"{result.perplexity:.3f}"),
        ("tokens read", f"{result.sequences} x {result.window}"),
        ("tokens per second", number(result.tokens_per_second)),
        ("peak memory", size_text(result.peak_memory)),
    ]
    if result.kl is not None and result.agreement is not None and result.reference_perplexity is not None:
        rows += [
            ("perplexity of the reference", f"{result.reference_perplexity:.3f}"),
            ("mean KL(reference || model), nats", number(result.kl)),
            ("top-1 agreement", f"{100 * result.agreement:.2f} %"),
        ]
    table(("figure", "value"), rows)
