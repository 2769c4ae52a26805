"""``ingot eval``."""

from __future__ import annotations

from typing import Annotated

import typer

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
    app.command("eval", epilog=EPILOG)(command)


def command(
    model: Annotated[str, typer.Argument(help="Folder or file, with config.json and tokenizer beside the weights.")],
    text: Annotated[str, typer.Option(help="Text file in UTF-8 that the model was not trained on.")],
    reference: Annotated[str | None, typer.Option(help="Model to compare the predictions with.")] = None,
    window: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens of a window; each read without context.")
    ] = 256,
    sequences: Annotated[
        int, typer.Option(min=1, metavar="N", help="Windows to read, from the text's beginning.")
    ] = 96,
    dtype: Annotated[str, typer.Option(help="Element type to compute in.")] = "f32",
    keep_packed: Annotated[bool, typer.Option("--keep-packed", help="Compute from the packed weights.")] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use and make faster stored forms.")] = True,
    max_ram: Annotated[
        str | None, typer.Option(help="Memory that weights may be decoded into, such as 2GiB; by default what is free.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure a model on a text: perplexity, speed, memory; with --reference also KL and top-1 agreement.

    Needs the extra transformers.
    """
    from ingot.adapters.evaluate import Protocol, evaluate

    protocol = Protocol(window, sequences, dtype, keep_packed)
    result = evaluate(model, text, reference, protocol, cache=cache, max_ram=max_ram)
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
