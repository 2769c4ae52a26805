"""The report of an evaluation for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ingot.reporting.report import Column, Figure, Line, Report, Table
from ingot.reporting.text import number, size_text
from ingot.runtime.evaluation.special_tokens import prefix_text

if TYPE_CHECKING:
    from ingot.runtime.evaluation.evaluate import Evaluation


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
    ("compute_kl", "mean KL(exact || int8), nats", number),
)
_COLUMNS = (Column("", head="figure"), Column("", "data", "value"), Column("", "data", "95 % interval"))
_LAYERS = (Column("", head="layer"), Column("", "cosine", "cosine"), Column("", "number", "relative error"))


def report_of(result: Evaluation) -> Report:
    """Return the figures with their intervals, the layers, and the verdicts of the gate."""
    tables = [Table("", _COLUMNS, _rows(result), data=False)]
    closing = [Line("{item}", each="gate")] if result.gate else []
    if result.layers:
        tables.append(_layers(result))
    if result.receipt is not None:
        closing.append(Line("receipt: {receipt}"))
    gate = [
        f"{verdict.term}: {'met' if verdict.met else 'missed'}, found {number(verdict.found, 6)}"
        for verdict in result.gate
    ]
    return Report([Figure("gate", gate, "texts"), Figure("receipt", result.receipt)], (), tables, closing)


def _rows(result: Evaluation) -> list[tuple[str, str, str]]:
    rows = [
        ("tokens read", f"{result.sequences} x {result.window}", ""),
        ("each window begins with", prefix_text(result.window_prefix), ""),
        ("tokens per second", number(result.tokens_per_second), ""),
        ("peak memory", size_text(result.peak_memory), ""),
    ]
    if result.kv_cache is not None:
        use = result.kv_cache
        share = f"{use.bytes_per_token:.0f} of {use.full_bytes_per_token:.0f}"
        rows.append((f"KV cache {use.kind}, bytes per token", share, ""))
    for name, label, show in _FIGURES:
        value, interval = getattr(result, name), result.intervals.get(name)
        if value is not None:
            interval_text = "" if interval is None else f"{show(interval[0])} to {show(interval[1])}"
            rows.append((label, show(value), interval_text))
    rows.sort(key=lambda row: row[0] != "perplexity")
    return rows


def _layers(result: Evaluation) -> Table:
    rows: list[tuple[Any, ...]] = [
        (layer.layer, layer.cosine, layer.error, "departs" if layer.layer == result.departing else "")
        for layer in result.layers
    ]
    note = (
        f"no layer's error is above {result.departs:g}"
        if result.departing is None
        else f"{result.departing} is the first whose error is above {result.departs:g}"
    )
    return Table("", (*_LAYERS, Column("", "data", " ")), rows, data=False, after=note)
