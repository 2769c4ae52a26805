"""The figures of an evaluation, and their report for terminals and notebooks."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ingot.artifacts.destination import CPU
from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open_source
from ingot.core.registry import did_you_mean
from ingot.core.runtime.bootstrap import Interval
from ingot.errors import INGOT_VERSION, UsageError
from ingot.inspect.receipt import add_receipt
from ingot.reporting.report import Column, Figure, Line, Report, Table, number, size_text
from ingot.reporting.reportable import Reportable
from ingot.runtime.evaluation.layer_errors import LayerError
from ingot.runtime.evaluation.special_tokens import SpecialToken, prefix_text
from ingot.runtime.loading.kv_options import KvUse
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.options import EXACT, Measures, Protocol
from ingot.stores.location import Location

RULE = "eval.gate"
NAMES = {
    "ppl": "perplexity",
    "kl": "kl",
    "kl_median": "kl_median",
    "kl_p99": "kl_p99",
    "kl_max": "kl_max",
    "agreement": "agreement",
    "top_k": "top_k",
    "layer_error": "layer_error",
    "layer_cosine": "layer_cosine",
}
"""The field of ``Evaluation`` for each name that a term of a gate may use."""
WITHOUT_REFERENCE = frozenset({"perplexity"})
"""Figures that need no reference."""
_TERM = re.compile(r"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*(x|%|)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Term:
    """A limit on a figure; if ``relative`` is set, ``bound`` is a multiple of the same figure of the reference."""

    text: str
    figure: str
    operator: str
    bound: float
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a term: its text, the measured value, and whether the value meets the bound.

    For a relative term, the measured value is divided by the value of the reference.
    """

    term: str
    measured: float
    met: bool


def parse_gate(text: str) -> list[Term]:
    """Return the terms of a gate: ``NAME<VALUE``, also with ``<=``, ``>`` or ``>=``, separated by commas.

    ``ppl<1.01x`` is a multiple of the reference's perplexity, ``agreement>98%`` a percentage. Raises ``UsageError``
    ``eval.gate``.
    """
    return [_term(item) for item in text.split(",")]


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise UsageError(
            f"expected terms such as kl<0.02, ppl<1.01x or agreement>98%, commas between, found {text.strip()!r:.80}",
            rule=RULE,
        )
    name, sign, number, unit = match.groups()
    if name not in NAMES:
        raise UsageError(
            f"expected one of {', '.join(NAMES)} in --gate, found {name!r:.80}{did_you_mean(name, NAMES)}", rule=RULE
        )
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise UsageError(f"expected a number after {name}{sign}, found {number!r:.80}", rule=RULE)
    if unit == "x" and name != "ppl":
        raise UsageError(f"only ppl can be a multiple of the reference's, found {text.strip()!r:.80}", rule=RULE)
    return Term(text.strip(), NAMES[name], sign, bound / 100 if unit == "%" else bound, unit == "x")


def require_measured(terms: Sequence[Term], measured: Collection[str], *, reference: bool) -> None:
    """Raise ``UsageError`` ``eval.gate`` if a term needs a figure that the run will not measure."""
    for term in terms:
        if (term.relative or term.figure not in WITHOUT_REFERENCE) and not reference:
            raise UsageError(f"{term.text!r} needs a model to compare with: add --reference", rule=RULE)
        if term.figure not in measured:
            raise UsageError(
                f"{term.text!r} needs a figure that is not measured: add {_OPTIONS[term.figure]}", rule=RULE
            )


_OPTIONS = {
    **dict.fromkeys(("kl_median", "kl_p99", "kl_max"), "--kl"),
    **dict.fromkeys(("layer_error", "layer_cosine"), "--per-layer"),
    "top_k": "--top-k N",
}


def check_terms(terms: Sequence[Term], figures: Mapping[str, float], relative: Mapping[str, float]) -> list[Verdict]:
    """Return the verdict on each term; NaN meets no term."""
    verdicts = []
    for term in terms:
        value = (relative if term.relative else figures)[term.figure]
        verdicts.append(Verdict(term.text, value, _OPERATORS[term.operator](value, term.bound)))
    return verdicts


@dataclass(frozen=True, slots=True)
class Evaluation(Reportable):
    """Figures of a model on a text.

    ``perplexity`` is exp of the mean negative log-likelihood of the tokens of each window except the first, given the
    tokens before them in the window. ``window_prefix`` has the tokens that the tokenizer adds before a text. Each
    window begins with them, and they are not scored. ``tokens_per_second`` is the number of all tokens divided by the
    duration of the model's passes. ``peak_memory`` is the largest resident set of the process in bytes, mapped files
    included, up to the end of the first pass, before a reference is loaded.

    The comparisons are None without a reference. ``kl`` is the mean over tokens of KL(reference || model) in nats.
    ``kl_median``, ``kl_p99`` (the 99th percentile over tokens) and ``kl_max`` are set if requested. ``agreement`` is
    the share of tokens for which both predict the same token. ``top_k`` is the share of the reference's k likeliest
    tokens that are among the model's k likeliest. ``perplexity_ratio`` is the model's perplexity divided by the
    reference's.

    ``compute`` is the mode in which packed linear layers multiply. For ``int8``, ``compute_kl`` is the effect of
    rounding inputs: the mean over tokens of KL(the same model in exact mode || model).

    ``kv_cache`` is the memory of the packed keys and values of all windows of a batch. If it is set, each token is
    predicted from the contents of the packed cache, as if tokens were read one at a time.

    ``tokens`` is the sha256 of the tokens that were read, i64 little-endian, for comparing evaluations. ``intervals``
    are 95 % bootstrap intervals over windows, keyed by figure. ``layers`` are in the order of execution. ``departing``
    is the first layer whose error is above ``departs``. ``gate`` has the verdict on each term.
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
    """Return the report of an evaluation: its figures with intervals, the layers, and the verdicts of the gate."""
    tables = [Table("", _COLUMNS, _rows(result), data=False)]
    closing = [Line("{item}", items="gate")] if result.gate else []
    if result.layers:
        tables.append(_layers(result))
    if result.receipt is not None:
        closing.append(Line("receipt: {receipt}"))
    gate = [
        f"{verdict.term}: {'met' if verdict.met else 'missed'}, found {number(verdict.measured, 6)}"
        for verdict in result.gate
    ]
    return Report([Figure("gate", gate, "texts"), Figure("receipt", result.receipt)], (), tables, closing)


def _rows(result: Evaluation) -> list[tuple[str, str, str]]:
    rows = [
        ("tokens read", f"{result.sequences} x {result.window}", ""),
        ("each window begins with", prefix_text(result.window_prefix), ""),
        ("tokens per second", number(result.tokens_per_second), ""),
        ("peak memory" if result.load.device == CPU else "peak memory of the host", size_text(result.peak_memory), ""),
    ]
    if result.load.device != CPU:
        rows.append(("device", result.load.device, ""))
    if result.kv_cache is not None:
        use = result.kv_cache
        share = f"{use.bytes_per_token:.0f} of {use.full_bytes_per_token:.0f}"
        rows.append((f"KV cache {use.kind}, bytes per token", share, ""))
    for name, label, show in _FIGURES:
        value = getattr(result, name)
        interval = result.intervals.get(name)
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


FIGURE_NAMES = (
    "perplexity",
    "reference_perplexity",
    "perplexity_ratio",
    "kl",
    "kl_median",
    "kl_p99",
    "kl_max",
    "agreement",
    "top_k",
    "compute_kl",
)


def write_receipt(
    result: Evaluation,
    location: Location,
    text: Location,
    reference: Location | None,
    protocol: Protocol,
    measures: Measures,
) -> str:
    """Add an evaluation to the receipt of an artifact; return the receipt's location.

    The receipt contains names of files without their folders, which may be private. Raises the errors of
    ``add_receipt``.
    """
    compared = None if reference is None else {"name": reference.name, "weights": _content(reference)}
    subject = {
        "kind": "eval",
        "text": {"name": text.name, "tokens": result.tokens},
        "window": protocol.window,
        "sequences": result.sequences,
        "dtype": str(protocol.dtype),
        "keep_packed": protocol.keep_packed,
        "reference": compared,
        **({"window_prefix": [asdict(token) for token in result.window_prefix]} if result.window_prefix else {}),
        **({} if result.load.device == CPU else {"device": result.load.device}),
        **({} if result.compute == EXACT else {"compute": result.compute}),
        **({} if result.kv_cache is None else {"kv_cache": result.kv_cache.kind}),
    }
    figures = {name: value for name in FIGURE_NAMES if (value := getattr(result, name)) is not None}
    entry: dict[str, Any] = {"of": subject, "by": f"ingot {INGOT_VERSION}", "figures": figures}
    if measures.top_k is not None:
        entry["top_k"] = measures.top_k
    if result.intervals:
        entry |= {"intervals": result.intervals, "resamples": measures.resamples, "seed": measures.seed}
    if result.layers:
        layers = [asdict(item) for item in result.layers]
        entry |= {"layers": layers, "departs": result.departs, "departing": result.departing}
    if result.gate:
        entry["gate"] = [asdict(item) for item in result.gate]
    return add_receipt(location, finite(entry), measures.progress)


def finite(value: Any) -> Any:
    """Return JSON-like data with None instead of infinities and NaN, which JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _content(location: Location) -> str:
    source = open_source(location, io="pread")
    try:
        return content_id(source.view())
    finally:
        source.close()
