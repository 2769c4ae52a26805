"""``ingot eval``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.adapters.options import Loading, Measures, Protocol
from ingot.cli.derive import derived
from ingot.cli.output import Json, Quiet, print_json, progress_bar
from ingot.cli.tables import line, table
from ingot.model.words import number, size_text

if TYPE_CHECKING:
    from ingot.adapters.evaluate import Evaluation

EPILOG = (
    "Examples:\n\n"
    "  ingot eval ./Llama-3-8B --text heldout.txt\n\n"
    "  ingot eval ./packed --text heldout.txt --reference ./Llama-3-8B --keep-packed\n\n"
    "  ingot eval ./packed --text heldout.txt --reference ./Llama-3-8B --gate 'kl<0.02,ppl<1.01x' --receipt\n\n"
    "  ingot eval model.zt --text heldout.txt --window 512 --sequences 32 --json"
)


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _plain(value: float) -> str:
    return f"{value:.3f}"


_FIGURES: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("perplexity", "perplexity", _plain),
    ("reference_perplexity", "perplexity of the reference", _plain),
    ("perplexity_ratio", "times that of the reference", lambda value: f"{value:.4f}"),
    ("kl", "mean KL(reference || model), nats", number),
    ("kl_median", "its median over tokens", number),
    ("kl_p99", "99 % of tokens have less than", number),
    ("kl_max", "largest of a token", number),
    ("agreement", "top-1 agreement", _share),
    ("top_k", "top-k agreement", _share),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval", epilog=EPILOG)(derived(command))


def command(
    *,
    model: Annotated[str, typer.Argument(help="Folder or file, with config.json and tokenizer beside the weights.")],
    text: Annotated[str, typer.Option(help="Text file in UTF-8 that the model was not trained on.")],
    reference: Annotated[str | None, typer.Option(help="Model to compare the predictions with.")] = None,
    measures: Measures,
    protocol: Protocol,
    loading: Loading,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure a model on a text: perplexity, speed, memory; with --reference also KL and top-1 agreement.

    With intervals of 95 %, over windows drawn again. Exit code 1 if the model does not keep to --gate.
    Needs the extra transformers.
    """
    from ingot.adapters.evaluate import evaluate

    with progress_bar("evaluating", quiet=quiet or json) as progress:
        result = evaluate(model, text, reference, protocol, loading, replace(measures, progress=progress))
    if json:
        print_json(result)
    elif not quiet:
        _print(result)
    raise typer.Exit(0 if result.met else 1)


def _print(result: Evaluation) -> None:
    rows = [
        ("tokens read", f"{result.sequences} x {result.window}", ""),
        ("tokens per second", number(result.tokens_per_second), ""),
        ("peak memory", size_text(result.peak_memory), ""),
    ]
    for name, label, show in _FIGURES:
        value, within = getattr(result, name), result.intervals.get(name)
        if value is not None:
            between = "" if within is None else f"{show(within[0])} to {show(within[1])}"
            rows.append((label, show(value), between))
    rows.sort(key=lambda row: row[0] != "perplexity")
    table(("figure", "value", "95 % interval"), rows)
    if result.layers:
        shown = [
            (each.layer, f"{each.cosine:.6f}", number(each.error), "departs" if each.layer == result.departing else "")
            for each in result.layers
        ]
        print()
        table(("layer", "cosine", "relative error", ""), shown)
        line(
            f"no layer's error is above {result.departs:g}"
            if result.departing is None
            else f"{result.departing} is the first whose error is above {result.departs:g}"
        )
    for verdict in result.gate:
        line(f"{verdict.term}: {'met' if verdict.met else 'missed'}, found {number(verdict.found, 6)}")
    if result.receipt is not None:
        line(f"receipt: {result.receipt}")
