"""What a conversion costs: perplexity on a text, and how far the next-token distributions are from a reference's."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ingot.core.border import bordered
from ingot.core.extras import require
from ingot.core.runtime.bootstrap import Interval
from ingot.core.runtime.memory import peak_rss
from ingot.core.runtime.progress import Progress
from ingot.errors import UsageError
from ingot.inspect.receipt import require_place
from ingot.reporting.report import Report, Shown
from ingot.runtime.evaluation.eval_gate import Term, Verdict, judged, parse_gate, require_measured
from ingot.runtime.evaluation.eval_receipt import write_receipt
from ingot.runtime.evaluation.eval_report import report_of
from ingot.runtime.evaluation.generate import positions, require_room, require_vocabulary, vocabulary
from ingot.runtime.evaluation.layer_errors import LayerError, LayerErrors, first_departing, of_layers
from ingot.runtime.evaluation.scores import Scores
from ingot.runtime.evaluation.special_tokens import SpecialToken
from ingot.runtime.evaluation.windows import Windows, read_windows
from ingot.runtime.loading.kv_options import KvUse
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.model_source import AnyPath
from ingot.runtime.loading.options import EXACT, Loading, LoadOptions, Measures, Protocol
from ingot.runtime.loading.serving import KV_CACHES, PACKED
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.table import location_of

# Logits of a pass, in elements: 64 MiB in f32.
_LOGITS = 1 << 24


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


@dataclass(slots=True)
class Passes:
    """What the model's passes took; ``first_scored`` is the position of a window's first token that is scored."""

    first_scored: int = 1
    tokens: int = 0
    seconds: float = 0.0
    peak: int = 0
    kv_cache: KvUse | None = None


@bordered
def evaluate(
    path: AnyPath,
    text: AnyPath,
    reference: AnyPath | None = None,
    protocol: Protocol | None = None,
    loading: Loading | None = None,
    measures: Measures | None = None,
) -> Evaluation:
    """Score ``text`` with a model, and compare its predictions with those of ``reference``.

    Parameters
    ----------
    path, reference : path
        As for ``load_model``; the tokenizer is that of ``path``.
    text : path
        A text file in UTF-8.
    protocol : Protocol, optional
        96 windows of 256 tokens in f32 by default. The reference is computed in the same type, never packed.
    loading : Loading, optional
        How both models are loaded.
    measures : Measures, optional
        What is measured beside perplexity, KL and agreement, and the gate.

    Raises
    ------
    UsageError
        ``eval.text``: no UTF-8, or fewer tokens than a window; ``eval.window``; ``eval.vocabulary``: the reference has
        another vocabulary; ``eval.layers``: it has other layers; ``eval.reference``: none where one is needed;
        ``eval.top-k``: more tokens than there are; ``eval.gate``: cannot be read, or names what is not measured;
        ``kv.evict``, ``kv.layers``: a packed KV cache with what it does not go with.
    IngotError
        As ``load_model``; ``model.tokenizer``, ``model.vocabulary``; ``generate.no-head``.
    """
    torch = require("torch", EXTRA)
    chosen, loading, measures = protocol or Protocol(), loading or Loading(), measures or Measures()
    terms = _terms(measures, compared=reference is not None)
    if measures.receipt:
        require_place(path)
    _require_steps(loading, measures)
    reports: list[LoadReport] = []
    wanted = loading.load_options(path, device=chosen.device, dtype=chosen.dtype, keep_packed=chosen.keep_packed)
    model = load_model(replace(wanted, report=reports.append))
    _require_tokens(model, measures.top_k)
    windows = _windows(model, path if loading.model_dir is None else loading.model_dir, text, chosen)
    plain = replace(wanted, keep_packed=False, compute=EXACT, kv_cache=None)
    other = None if reference is None else replace(plain, path=reference)
    passes, scores, layers = scored(torch, model, windows, other, measures)
    result = Evaluation(
        model=location_of(path),
        text=location_of(text),
        window=chosen.window,
        sequences=len(windows),
        window_prefix=windows.prefix,
        tokens=f"sha256:{hashlib.sha256(windows.tokens.cpu().numpy().astype('<i8').tobytes()).hexdigest()}",
        tokens_per_second=passes.tokens / max(passes.seconds, 1e-9),
        peak_memory=passes.peak,
        load=reports[0],
        reference=None if reference is None else location_of(reference),
        compute=loading.compute,
        kv_cache=passes.kv_cache,
        **_found(scores, layers, measures, terms),
    )
    if not measures.receipt:
        return result
    return replace(result, receipt=write_receipt(result, path, text, reference, chosen, measures))


def _require_steps(loading: Loading, measures: Measures) -> None:
    """Refuse what cannot be measured where a packed KV cache has windows read in steps."""
    if loading.kv_cache is None:
        return
    if measures.per_layer:
        raise UsageError(
            "expected the full cache to compare layers with, whose outputs are those of one pass, found a packed one",
            rule="kv.layers",
        )
    if loading.kv_cache.evict is not None:
        raise UsageError(
            "expected a cache without evict to read a text with, found one: no part of the text is a prompt",
            rule="kv.evict",
        )


def _windows(model: Any, folder: AnyPath, text: AnyPath, protocol: Protocol) -> Windows:
    """Return the windows of tokens, on the model's device; refuses what it cannot read."""
    require_window(model, protocol.window)
    windows = read_windows(load_tokenizer(folder), text, protocol).to(model.device)
    require_vocabulary(model, windows.tokens)
    return windows


def _found(scores: Scores, layers: Sequence[LayerError], measures: Measures, terms: Sequence[Term]) -> dict[str, Any]:
    """Return what an ``Evaluation`` says of quality."""
    figures: dict[str, Any] = scores.figures()
    ratios = {"perplexity": figures.get("perplexity_ratio", math.nan)}
    return figures | {
        "intervals": scores.intervals(measures.resamples, measures.seed),
        "layers": layers,
        "departs": measures.departs if layers else None,
        "departing": first_departing(layers, measures.departs),
        "gate": judged(terms, figures | of_layers(layers), ratios),
    }


def _terms(measures: Measures, *, compared: bool) -> list[Term]:
    """Return the gate's terms; refuses what is asked for and cannot be measured."""
    if measures.compares and not compared:
        raise UsageError(
            "expected a model to compare with for KL, top-k and layers, found none: add --reference",
            rule="eval.reference",
        )
    if measures.gate is None:
        return []
    terms, measured = parse_gate(measures.gate), {"perplexity", "kl", "agreement"}
    if measures.kl:
        measured |= {"kl_median", "kl_p99", "kl_max"}
    if measures.top_k is not None:
        measured.add("top_k")
    if measures.per_layer:
        measured |= {"layer_error", "layer_cosine"}
    require_measured(terms, measured, reference=compared)
    return terms


def scored(
    torch: Any, model: Any, windows: Windows, reference: LoadOptions | None, measures: Measures
) -> tuple[Passes, Scores, list[LayerError]]:
    """Read all windows by the model, and by the reference, which is loaded once the model's memory is known."""
    rounded = bool(require("ingot.runtime.layers.rounded_inputs", EXTRA).rounds_inputs(model))
    scores = Scores(reference is not None, measures.top_k, measures.kl, rounded)
    passes = Passes(first_scored=windows.first_scored)
    batches = _batches(windows.tokens, 1 if measures.per_layer else _together(model, windows.length))
    progress = Progress(windows.tokens.numel(), measures.progress)
    first = next(batches)
    with torch.inference_mode():
        _timed(model, first, Passes())  # warms up, and shows what memory it takes
        passes.peak = peak_rss()
        other = None if reference is None else _reference(reference, windows.length, vocabulary(model))
        errors = LayerErrors(model, other) if measures.per_layer else None
        for batch in (first, *batches):
            _score(model, other, batch, passes, scores, errors)
            progress.advance(batch.numel(), "windows")
    return passes, scores, [] if errors is None else errors.errors()


def require_window(model: Any, window: int) -> None:
    """Refuse what is no language model, and windows longer than it has positions for: ``eval.window``."""
    require_room(model, 1, 0)
    most = positions(model)
    if most is not None and window > most:
        raise UsageError(
            f"expected a window of at most {most} tokens, which the model has positions for, found {window}",
            rule="eval.window",
        )


def _reference(options: LoadOptions, window: int, size: int) -> Any:
    model = load_model(options)
    require_window(model, window)
    if vocabulary(model) != size:
        raise UsageError(
            f"expected a reference with a vocabulary of {size}, found {vocabulary(model)}",
            rule="eval.vocabulary",
            where=location_of(options.path),
        )
    return model


def _require_tokens(model: Any, top_k: int | None) -> None:
    if top_k is not None and top_k > vocabulary(model):
        raise UsageError(
            f"expected a top-k of at most {vocabulary(model)} tokens, which the model knows, found {top_k}",
            rule="eval.top-k",
        )


def _together(model: Any, length: int) -> int:
    """Return how many windows pass through the model together: one, where its logits take much."""
    return max(1, _LOGITS // (length * max(1, vocabulary(model))))


def _batches(windows: Any, step: int) -> Iterator[Any]:
    for start in range(0, len(windows), step):
        yield windows[start : start + step]


def _timed(model: Any, batch: Any, passes: Passes) -> Any:
    """Return the logits that predict the scored tokens of each window: f32 [windows, predictions, vocabulary]."""
    wait = _waiting(batch.device)
    wait()
    began = time.perf_counter()
    kv = KV_CACHES[PACKED]
    if kv.settings_of(model) is None:
        logits = model(input_ids=batch, use_cache=False).logits
    else:
        logits, cache = kv.read_in_steps(model, batch)
        passes.kv_cache = passes.kv_cache or cache.use()
    wait()
    passes.seconds += time.perf_counter() - began
    passes.tokens += batch.numel()
    return logits[:, passes.first_scored - 1 : -1].float()


def _waiting(device: Any) -> Callable[[], object]:
    """Return what waits until a device has done what it was told: all but the CPU compute while Python goes on."""
    if device.type == "cpu":
        return lambda: None
    torch = require("torch", EXTRA)
    of_kind = getattr(torch, device.type)
    return partial(of_kind.synchronize) if device.type == "mps" else partial(of_kind.synchronize, device)


def _score(model: Any, other: Any, batch: Any, passes: Passes, scores: Scores, errors: LayerErrors | None) -> None:
    """Read one batch of windows, and score it a window at a time."""
    with nullcontext() if errors is None else errors.model_runs():
        logits = _timed(model, batch, passes)
    exact = wanted = None
    if scores.rounded:
        with require("ingot.runtime.layers.rounded_inputs", EXTRA).unrounded(model):
            exact = _timed(model, batch, Passes(passes.first_scored))
    if other is not None:
        with nullcontext() if errors is None else errors.reference_runs():
            wanted = _timed(other, batch.to(other.device), Passes(passes.first_scored)).to(logits.device)
    for index, targets in enumerate(batch[:, passes.first_scored :]):
        beside = (None if every is None else every[index] for every in (wanted, exact))
        scores.add(logits[index], targets, *beside)
