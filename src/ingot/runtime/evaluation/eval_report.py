"""The figures of an evaluation, and its report in a terminal and in a notebook."""

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
    """Figures of one model on one text.

    ``perplexity`` is exp of the mean negative log-likelihood of the tokens of each window but the first, given those
    before it in the window. ``window_prefix`` has the tokens that the tokenizer puts before a text: each window begins
    with them, and they are not scored. ``tokens_per_second`` counts all tokens read, the model's passes alone;
    ``peak_memory`` is the process's resident bytes, mapped files included, after the first pass and before a reference
    is loaded.

    Against the reference, None without one: ``kl`` is the mean over tokens of KL(reference || model) in nats,
    ``kl_median``, ``kl_p99`` (99 % of tokens have less) and ``kl_max`` where asked for; ``agreement`` the share of
    tokens for which both find the same next token likeliest, ``top_k`` the share of the reference's likeliest tokens
    that are among as many of the model's. ``perplexity_ratio`` is that of the model to that of the reference.

    ``compute`` is how packed linear layers multiplied; of ``int8``, ``compute_kl`` is what rounding adds: the
    mean over tokens of KL(the same model in exact mode || model).

    ``kv_cache`` is what keys and values take, in all windows read together, where they were packed: then each token is
    predicted from what the cache holds for it, as if tokens were read one by one.

    ``tokens`` is the sha256 of the tokens that were read, i64 little-endian, of whatever text and tokenizer they are.
    ``intervals`` are those of 95 % of figures, by name, over windows drawn again. ``layers`` are in the order in which
    they run; ``departing`` is the first whose error is above ``departs``. ``gate`` has what each term found.
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
        """Whether the model keeps to the gate; so it does where there is none."""
        return all(verdict.met for verdict in self.gate)

    def report(self) -> Report:
        """Return the figures, the layers and what the gate found."""
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
    """Return the figures, with their intervals, the layers, and what the gate found."""
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
        value, within = getattr(result, name), result.intervals.get(name)
        if value is not None:
            between = "" if within is None else f"{show(within[0])} to {show(within[1])}"
            rows.append((label, show(value), between))
    rows.sort(key=lambda row: row[0] != "perplexity")
    return rows


def _layers(result: Evaluation) -> Table:
    rows: list[tuple[Any, ...]] = [
        (each.layer, each.cosine, each.error, "departs" if each.layer == result.departing else "")
        for each in result.layers
    ]
    told = (
        f"no layer's error is above {result.departs:g}"
        if result.departing is None
        else f"{result.departing} is the first whose error is above {result.departs:g}"
    )
    return Table("", (*_LAYERS, Column("", "data", " ")), rows, data=False, after=told)
