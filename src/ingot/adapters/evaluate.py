"""What a conversion costs: perplexity on a text, and how far the next-token distributions are from a reference's."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ingot.adapters.generate import positions, require_room, require_vocabulary, vocabulary
from ingot.adapters.load_report import LoadReport
from ingot.adapters.model_source import AnyPath
from ingot.adapters.options import Loading, LoadOptions, Protocol
from ingot.adapters.transformers import load_model
from ingot.adapters.transformers_config import EXTRA
from ingot.adapters.transformers_tokenizer import load_tokenizer
from ingot.core.extras import require
from ingot.core.memory import peak_rss
from ingot.errors import UsageError
from ingot.stores.table import location_of, read_start

# Read so many bytes of text for each token wanted: no tokenizer of text that people write needs more.
_BYTES_PER_TOKEN = 64
# Logits of a pass, in elements: 64 MiB in f32.
_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of one model on one text.

    ``perplexity`` is exp of the mean negative log-likelihood of the tokens of each window but the first, given those
    before it in the window; ``tokens_per_second`` counts all tokens read, the model's passes alone; ``peak_memory`` is
    the process's resident bytes, mapped files included, after the first pass and before a reference is loaded.

    Against the reference, None without one: ``kl`` is the mean over tokens of KL(reference || model) in nats,
    ``agreement`` the share of tokens for which both find the same next token likeliest.
    """

    model: str
    text: str
    window: int
    sequences: int
    perplexity: float
    tokens_per_second: float
    peak_memory: int
    load: LoadReport
    reference: str | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None


@dataclass(slots=True)
class _Sums:
    """Sums over the windows read so far."""

    loss: float = 0.0
    reference_loss: float = 0.0
    kl: float = 0.0
    same: int = 0
    predictions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    peak: int = 0


def evaluate(
    path: AnyPath,
    text: AnyPath,
    reference: AnyPath | None = None,
    protocol: Protocol | None = None,
    loading: Loading | None = None,
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

    Raises
    ------
    UsageError
        ``eval.text``: no UTF-8, or fewer tokens than a window; ``eval.window``; ``eval.vocabulary``: the reference has
        another vocabulary.
    IngotError
        As ``load_model``; ``model.tokenizer``, ``model.vocabulary``; ``generate.no-head``.
    """
    torch = require("torch", EXTRA)
    chosen, loading = protocol or Protocol(), loading or Loading()
    reports: list[LoadReport] = []
    wanted = loading.of(path, device=chosen.device, dtype=chosen.dtype, keep_packed=chosen.keep_packed)
    model = load_model(replace(wanted, report=reports.append))
    _require_window(model, chosen.window)
    folder = path if loading.model_dir is None else loading.model_dir
    windows = read_windows(load_tokenizer(folder), text, chosen).to(model.device)
    require_vocabulary(model, windows)
    if reference is not None:
        wanted = replace(wanted, path=reference, keep_packed=False)
    sums = _scored(torch, model, windows, None if reference is None else wanted)
    compared = reference is not None
    return Evaluation(
        model=location_of(path),
        text=location_of(text),
        window=chosen.window,
        sequences=len(windows),
        perplexity=_exp(sums.loss / sums.predictions),
        tokens_per_second=sums.tokens / max(sums.seconds, 1e-9),
        peak_memory=sums.peak,
        load=reports[0],
        reference=None if reference is None else location_of(reference),
        reference_perplexity=_exp(sums.reference_loss / sums.predictions) if compared else None,
        kl=sums.kl / sums.predictions if compared else None,
        agreement=sums.same / sums.predictions if compared else None,
    )


def _scored(torch: Any, model: Any, windows: Any, reference: LoadOptions | None) -> _Sums:
    """Read all windows by the model, and by the reference, which is loaded once the model's memory is known."""
    sums, batches = _Sums(), _batches(windows, vocabulary(model))
    first = next(batches)
    with torch.inference_mode():
        _timed(model, first, _Sums())  # warms up, and shows what memory it takes
        sums.peak = peak_rss()
        other = None if reference is None else _reference(reference, windows.shape[1], vocabulary(model))
        for batch in (first, *batches):
            _score(torch, model, other, batch, sums)
    return sums


def read_windows(tokenizer: Any, text: AnyPath, protocol: Protocol) -> Any:
    """Return the tokens that ``protocol`` reads of a text file: i64 [sequences, window], fewer where it is short."""
    where, limit = location_of(text), protocol.window * protocol.sequences * _BYTES_PER_TOKEN
    data = read_start(text, limit)
    try:
        content = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < limit)
    except UnicodeDecodeError as error:
        raise UsageError(f"expected text in UTF-8: {error.reason}", rule="eval.text", where=where) from error
    tokens = tokenizer(content, add_special_tokens=False, verbose=False).input_ids
    count = min(protocol.sequences, len(tokens) // protocol.window)
    if not count:
        raise UsageError(
            f"expected a text of at least {protocol.window} tokens, found {len(tokens)}; take a smaller window",
            rule="eval.text",
            where=where,
        )
    windows = require("torch", EXTRA).tensor(tokens[: count * protocol.window])
    return windows.reshape(count, protocol.window)


def _require_window(model: Any, window: int) -> None:
    require_room(model, 1, 0)
    most = positions(model)
    if most is not None and window > most:
        raise UsageError(
            f"expected a window of at most {most} tokens, which the model has positions for, found {window}",
            rule="eval.window",
        )


def _reference(options: LoadOptions, window: int, size: int) -> Any:
    model = load_model(options)
    _require_window(model, window)
    if vocabulary(model) != size:
        raise UsageError(
            f"expected a reference with a vocabulary of {size}, found {vocabulary(model)}",
            rule="eval.vocabulary",
            where=location_of(options.path),
        )
    return model


def _batches(windows: Any, vocabulary: int) -> Iterator[Any]:
    step = max(1, _LOGITS // (windows.shape[1] * max(1, vocabulary)))
    for start in range(0, len(windows), step):
        yield windows[start : start + step]


def _timed(model: Any, batch: Any, sums: _Sums) -> Any:
    """Return the logits for all tokens but the last of each window: f32 [predictions, vocabulary]."""
    wait = _waiting(batch.device)
    wait()
    began = time.perf_counter()
    logits = model(input_ids=batch, use_cache=False).logits
    wait()
    sums.seconds += time.perf_counter() - began
    sums.tokens += batch.numel()
    return logits[:, :-1].float().flatten(0, 1)


def _waiting(device: Any) -> Callable[[], object]:
    """Return what waits until a device has done what it was told: all but the CPU compute while Python goes on."""
    if device.type == "cpu":
        return lambda: None
    torch = require("torch", EXTRA)
    of_kind = getattr(torch, device.type)
    return partial(of_kind.synchronize) if device.type == "mps" else partial(of_kind.synchronize, device)


def _score(torch: Any, model: Any, other: Any, batch: Any, sums: _Sums) -> None:
    """Add one batch of windows to the sums, a window's worth of distributions at a time."""
    logits, targets = _timed(model, batch, sums), batch[:, 1:].flatten()
    expected = None if other is None else _timed(other, batch.to(other.device), _Sums()).to(logits.device)
    functional = torch.nn.functional
    for start in range(0, len(targets), batch.shape[1]):
        span = slice(start, start + batch.shape[1])
        log_probs = functional.log_softmax(logits[span], -1)
        sums.loss += float(functional.nll_loss(log_probs, targets[span], reduction="sum"))
        if expected is not None:
            wanted = functional.log_softmax(expected[span], -1)
            sums.reference_loss += float(functional.nll_loss(wanted, targets[span], reduction="sum"))
            sums.kl += float(functional.kl_div(log_probs, wanted, reduction="sum", log_target=True))
            sums.same += int((log_probs.argmax(-1) == wanted.argmax(-1)).sum())
    sums.predictions += len(targets)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
