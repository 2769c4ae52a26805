"""The figures of an evaluation, and their report for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.core.runtime.bootstrap import Interval
from ingot.reporting.report import Column, Figure, Line, Report, Table
from ingot.reporting.shown import Shown
from ingot.reporting.text import number, size_text
from ingot.runtime.evaluation.eval_gate import Verdict
from ingot.runtime.evaluation.layer_errors import LayerError
from ingot.runtime.evaluation.special_tokens import SpecialToken, prefix_text
from ingot.runtime.loading.kv_options import KvUse
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.options import EXACT


@dataclass(frozen=True, slots=True)
class Evaluation(Shown):
    """Figures of a model on a text.

    ``perplexity`` is exp of the mean negative log-likelihood of the tokens of each window except the first, given the
    tokens before them in the window. ``window_prefix`` has the tokens that the tokenizer adds before a text. Each
    window begins with them, and they are not scored. ``tokens_per_second`` counts all tokens over the seconds of the
    model's passes. ``peak_memory`` is the resident set of the process in bytes, with mapped files, after the first
    pass and before a reference is loaded.

    The comparisons are None without a reference. ``kl`` is the mean over tokens of KL(reference || model) in nats.
    ``kl_median``, ``kl_p99`` (99 % of tokens have less) and ``kl_max`` are set if requested. ``agreement`` is the share
    of tokens for which both predict the same token. ``top_k`` is the share of the reference's k likeliest tokens that
    are among the model's k likeliest. ``perplexity_ratio`` is the model's perplexity over the reference's.

    ``compute`` is how packed linear layers multiplied. For ``int8``, ``compute_kl`` is the effect of rounding inputs:
    the mean over tokens of KL(the same model in exact mode || model).

    ``kv_cache`` is the memory of packed keys and values of all windows that are read together. If it is set, each token
    is predicted from the contents of the packed cache, as if tokens were read one at a time.

    ``tokens`` is the sha256 of the tokens that were read, i64 little-endian, for comparing evaluations. ``intervals``
    are bootstrap intervals of 95 % over windows, by figure. ``layers`` are in the order in which they run.
    ``departing`` is the first layer whose error is above ``departs``. ``gate`` has the verdict on each term.
    """

    model: str
    text: str
    window: int
    sequences: int
    tokens: str
    perplexity: float
    tokens_per_second: float
    peak_memory: int
    load: LoadReport
    window_prefix: Sequence[SpecialToken] = ()
    reference: str | None = None
    reference_perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    agreement: float | None = None
    top_k: float | None = None
    compute: str = EXACT
    compute_kl: float | None = None
    kv_cache: KvUse | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    layers: Sequence[LayerError] = ()
    departs: float | None = None
    departing: str | None = None
    gate: Sequence[Verdict] = ()
    receipt: str | None = None

    @property
    def met(self) -> bool:
        """Whether the model meets all terms of the gate; true without a gate."""
        return all(verdict.met for verdict in self.gate)

    def report(self) -> Report:
        """Return the figures, the layers and the verdicts of the gate."""
        return report_of(self)


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
