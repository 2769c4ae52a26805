"""Evaluate a model: perplexity on a text, and the distance of its next-token distributions from those of a
reference.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ingot.core.border import bordered, require
from ingot.core.options import with_options
from ingot.core.runtime.device import synchronize
from ingot.core.runtime.memory import peak_rss
from ingot.core.runtime.progress import Progress
from ingot.errors import UsageError
from ingot.inspect.receipt import require_writable
from ingot.runtime.evaluation.eval_report import (
    Evaluation,
    Term,
    check_terms,
    parse_gate,
    require_measured,
    write_receipt,
)
from ingot.runtime.evaluation.generate import positions, require_room, require_vocabulary, vocabulary_size
from ingot.runtime.evaluation.layer_errors import LayerError, LayerErrors, first_departing, worst_of_layers
from ingot.runtime.evaluation.recorded import RecordedLogits
from ingot.runtime.evaluation.scores import Scores
from ingot.runtime.evaluation.windows import Windows, read_windows
from ingot.runtime.loading.kv_options import KvUse
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.options import EXACT, Loading, LoadOptions, Measures, Protocol
from ingot.runtime.loading.serving import KV_CACHES, PACKED
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import AnyPath, Location

# Maximum number of logits per pass: 64 MiB in f32.
_LOGITS = 1 << 24


@dataclass(slots=True)
class Passes:
    """Duration and memory of the model's passes; ``first_scored`` is the position of a window's first scored token."""

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
    **options: Any,
) -> Evaluation:
    """Score ``text`` with a model, and compare its predictions with those of ``reference``.

    Parameters
    ----------
    path, reference : path
        Paths for ``load_model``; the tokenizer of ``path`` is used.
    text : path
        A text file in UTF-8.
    protocol : Protocol, optional
        96 windows of 256 tokens in f32 by default. The reference computes in the same dtype, never packed.
    loading : Loading, optional
        Options of loading both models.
    measures : Measures, optional
        Measurements besides perplexity, KL and agreement, and the gate.
    options
        Fields of the three objects by name, such as ``sequences=16`` or ``keep_packed=True``.

    Raises
    ------
    UsageError
        ``eval.option``: an unknown option. ``eval.text``: no UTF-8, or fewer tokens than a
        window; ``eval.window``; ``eval.vocabulary``: the reference has
        another vocabulary; ``eval.layers``: it has other layers; ``eval.reference``: a measurement needs a reference;
        ``eval.top-k``: larger than the vocabulary; ``eval.gate``: invalid, or needs a figure that is not measured;
        ``kv.evict``, ``kv.layers``: these measurements do not work with a packed KV cache; ``model.arithmetic``: a
        receipt with a program's arithmetic.
    IngotError
        The errors of ``load_model``; ``model.tokenizer``, ``model.vocabulary``; ``generate.no-head``.

    Examples
    --------
    >>> report = ingot.evaluate("int4", "model/heldout.txt", "model", sequences=1)
    >>> report.kl < 0.1
    True
    """
    torch = require("torch", EXTRA)
    structs = (protocol or Protocol(), loading or Loading(), measures or Measures())
    protocol, loading, measures = with_options(structs, options, "eval")
    location = Location.parse(path)
    content = Location.parse(text)
    compared = None if reference is None else Location.parse(reference)
    terms = _terms(measures, compared=reference is not None)
    if measures.receipt and loading.arithmetic is not None:
        raise UsageError(
            "a receipt states figures of decoded values, not those of a program's arithmetic: leave one of the two out",
            rule="model.arithmetic",
        )
    if measures.receipt:
        require_writable(location)
    _require_steps(loading, measures)
    reports: list[LoadReport] = []
    model_options = loading.load_options(
        location, device=protocol.device, dtype=protocol.dtype, keep_packed=protocol.keep_packed
    )
    model = load_model(replace(model_options, report=reports.append))
    _require_tokens(model, measures.top_k)
    windows = _windows(model, location if loading.model_dir is None else loading.model_dir, content, protocol)
    exact_options = replace(model_options, keep_packed=False, compute=EXACT, arithmetic=None, kv_cache=None)
    reference_options = None if compared is None else replace(exact_options, path=compared)
    passes, scores, layers = score_windows(torch, model, windows, reference_options, measures)
    result = Evaluation(
        model=location.display,
        text=content.display,
        window=protocol.window,
        sequences=len(windows),
        window_prefix=windows.prefix,
        tokens=f"sha256:{hashlib.sha256(windows.tokens.cpu().numpy().astype('<i8').tobytes()).hexdigest()}",
        tokens_per_second=passes.tokens / max(passes.seconds, 1e-9),
        peak_memory=passes.peak,
        load=reports[0],
        reference=None if compared is None else compared.display,
        compute=loading.compute,
        kv_cache=passes.kv_cache,
        **_quality_fields(scores, layers, measures, terms),
    )
    if not measures.receipt:
        return result
    return replace(result, receipt=write_receipt(result, location, content, compared, protocol, measures))


def _require_steps(loading: Loading, measures: Measures) -> None:
    """Raise an error if a packed KV cache is combined with measurements that need one pass over a window."""
    if loading.kv_cache is None:
        return
    if measures.per_layer:
        raise UsageError(
            "expected an unpacked KV cache with --per-layer, because a packed one reads windows in several passes",
            rule="kv.layers",
        )
    if loading.kv_cache.evict is not None:
        raise UsageError(
            "expected a KV cache without evict, which applies to prompts: an evaluated text has none",
            rule="kv.evict",
        )


def _windows(model: Any, folder: AnyPath, text: Location, protocol: Protocol) -> Windows:
    """Return the windows of tokens on the model's device; raise an error if the model cannot read them."""
    require_window(model, protocol.window)
    windows = read_windows(load_tokenizer(folder), text, protocol).to(model.device)
    require_vocabulary(model, windows.tokens)
    return windows


def _quality_fields(
    scores: Scores, layers: Sequence[LayerError], measures: Measures, terms: Sequence[Term]
) -> dict[str, Any]:
    """Return the fields of an ``Evaluation`` that describe quality."""
    figures: dict[str, Any] = scores.figures()
    ratios = {"perplexity": figures.get("perplexity_ratio", math.nan)}
    return figures | {
        "intervals": scores.intervals(measures.resamples, measures.seed),
        "layers": layers,
        "departs": measures.departs if layers else None,
        "departing": first_departing(layers, measures.departs),
        "gate": check_terms(terms, figures | worst_of_layers(layers), ratios),
    }


def _terms(measures: Measures, *, compared: bool) -> list[Term]:
    """Return the terms of the gate; raise an error if a measurement needs a reference and none is given."""
    if measures.compares and not compared:
        raise UsageError(
            "KL, top-k and layers need a model to compare with: add --reference",
            rule="eval.reference",
        )
    if measures.gate is None:
        return []
    terms = parse_gate(measures.gate)
    measured = {"perplexity", "kl", "agreement"}
    if measures.kl:
        measured |= {"kl_median", "kl_p99", "kl_max"}
    if measures.top_k is not None:
        measured.add("top_k")
    if measures.per_layer:
        measured |= {"layer_error", "layer_cosine"}
    require_measured(terms, measured, reference=compared)
    return terms


def score_windows(
    torch: Any,
    model: Any,
    windows: Windows,
    reference: LoadOptions | RecordedLogits | None,
    measures: Measures,
    record: RecordedLogits | None = None,
) -> tuple[Passes, Scores, list[LayerError]]:
    """Read all windows with the model, and compare its logits with those of the reference.

    Returns the passes, the scores and the layers' errors. A reference that is a model is loaded after the peak memory
    of ``model`` is measured. ``record`` receives the logits of ``model``.
    """
    rounded = bool(require("ingot.runtime.layers.rounded_inputs", EXTRA).rounds_inputs(model))
    scores = Scores(reference is not None, measures.top_k, measures.kl, rounded)
    passes = Passes(first_scored=windows.first_scored)
    batches = _batches(windows.tokens, 1 if measures.per_layer else _windows_per_pass(model, windows.length))
    progress = Progress(windows.tokens.numel(), measures.progress)
    first = next(batches)
    with torch.inference_mode():
        _run_timed(model, first, Passes())  # not timed; the peak memory so far is that of the model alone
        passes.peak = peak_rss()
        loaded_reference = (
            _reference(reference, windows.length, vocabulary_size(model))
            if isinstance(reference, LoadOptions)
            else reference
        )
        errors = LayerErrors(model, loaded_reference) if measures.per_layer else None
        scored = 0
        for batch in (first, *batches):
            logits = _score(model, loaded_reference, scored, batch, passes, scores, errors)
            if record is not None:
                record.write(scored, logits)
            scored = scored + len(batch)
            progress.advance(batch.numel(), "windows")
    return passes, scores, [] if errors is None else errors.errors()


def require_window(model: Any, window: int) -> None:
    """Raise an error if the model has no language head, or (``eval.window``) fewer positions than a window."""
    require_room(model, 1, 0)
    max_positions = positions(model)
    if max_positions is not None and window > max_positions:
        raise UsageError(
            f"expected a window of at most {max_positions} tokens, the model's number of positions, found {window}",
            rule="eval.window",
        )


def _reference(options: LoadOptions, window: int, size: int) -> Any:
    model = load_model(options)
    require_window(model, window)
    if vocabulary_size(model) != size:
        raise UsageError(
            f"expected a reference with a vocabulary of {size}, found {vocabulary_size(model)}",
            rule="eval.vocabulary",
            where=Location.parse(options.path).display,
        )
    return model


def _require_tokens(model: Any, top_k: int | None) -> None:
    if top_k is not None and top_k > vocabulary_size(model):
        raise UsageError(
            f"expected a top-k of at most {vocabulary_size(model)}, the size of the vocabulary, found {top_k}",
            rule="eval.top-k",
        )


def _windows_per_pass(model: Any, length: int) -> int:
    """Return the number of windows per pass for which the logits stay within the limit; at least one."""
    return max(1, _LOGITS // (length * max(1, vocabulary_size(model))))


def _batches(windows: Any, step: int) -> Iterator[Any]:
    for start in range(0, len(windows), step):
        yield windows[start : start + step]


def _run_timed(model: Any, batch: Any, passes: Passes) -> Any:
    """Return the logits that predict the scored tokens of each window: f32 [windows, predictions, vocabulary]."""
    torch = require("torch", EXTRA)
    synchronize(torch, batch.device)
    began = time.perf_counter()
    kv = KV_CACHES[PACKED]
    if kv.settings_of(model) is None:
        logits = model(input_ids=batch, use_cache=False).logits
    else:
        logits, cache = kv.read_in_steps(model, batch)
        passes.kv_cache = passes.kv_cache or cache.use()
    synchronize(torch, batch.device)
    passes.seconds += time.perf_counter() - began
    passes.tokens += batch.numel()
    return logits[:, passes.first_scored - 1 : -1].float()


def _score(
    model: Any,
    reference_model: Any,
    first: int,
    batch: Any,
    passes: Passes,
    scores: Scores,
    errors: LayerErrors | None,
) -> Any:
    """Read a batch of windows, score each window, and return the model's logits.

    ``first`` is the index of the first window of the batch. ``reference_model`` is a model, recorded logits or None.
    """
    with nullcontext() if errors is None else errors.model_runs():
        logits = _run_timed(model, batch, passes)
    exact = reference = None
    if scores.rounded:
        with require("ingot.runtime.layers.rounded_inputs", EXTRA).unrounded(model):
            exact = _run_timed(model, batch, Passes(passes.first_scored))
    if isinstance(reference_model, RecordedLogits):
        reference = reference_model.read(first, len(batch)).to(logits.device)
    elif reference_model is not None:
        with nullcontext() if errors is None else errors.reference_runs():
            reference = _run_timed(reference_model, batch.to(reference_model.device), Passes(passes.first_scored)).to(
                logits.device
            )
    for index, targets in enumerate(batch[:, passes.first_scored :]):
        comparisons = (None if values is None else values[index] for values in (reference, exact))
        scores.add(logits[index], targets, *comparisons)
    return logits
