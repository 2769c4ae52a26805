"""KL divergence of models from their source, for checking budgets (``spec/budgets.md``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.conversion.budget.divergence import Kl
from ingot.core.border import require
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.runtime.calibration.calibration import LENGTH, SAMPLES
from ingot.runtime.calibration.samples import (
    HELD_OUT,
    SAMPLES_OF_MODEL,
    SAMPLES_WITHOUT_TOKENIZER,
    draw_samples,
    seeded,
)
from ingot.runtime.evaluation.beginnings import beginnings_of
from ingot.runtime.evaluation.evaluate import require_window, score_windows
from ingot.runtime.evaluation.generate import positions, require_room, require_vocabulary
from ingot.runtime.evaluation.special_tokens import SpecialToken, Surrounding, prefix_text
from ingot.runtime.evaluation.windows import Windows, read_windows, text_length_of_window
from ingot.runtime.loading.model_source import companions_folder
from ingot.runtime.loading.options import LoadOptions, Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import AnyPath, Location


class Divergence:
    """A function that measures KL(source || model) in f32, as ``evaluate`` does, on the same windows for all models.

    Parameters
    ----------
    source : path
        The reference model. It is loaded anew for each measurement, so that conversions can use its memory in between.
    text : path or None
        Text to read. If None, the source generates samples with a fixed seed.
    sequences : int or None
        Number of windows, 96 by default, fewer if a text is short. A window has 256 tokens or the model's maximum.
    progress : callable, optional

    Raises
    ------
    UnsupportedError
        ``generate.no-head``: the model has no language head.
    UsageError
        ``eval.text``, ``eval.vocabulary``.
    IngotError
        The errors of ``load_model``.
    """

    def __init__(
        self, source: AnyPath, text: AnyPath | None, sequences: int | None, *, progress: ProgressCallback | None = None
    ) -> None:
        torch = require("torch", EXTRA)
        self._source = Location.parse(source)
        self._progress = progress
        self._reference = LoadOptions(self._source, dtype="f32", keep_packed=False, cache=False)
        model = load_model(self._reference)
        require_room(model, 1, 0)
        max_positions = positions(model)
        count = sequences or SAMPLES
        window = LENGTH if max_positions is None else min(LENGTH, max_positions)
        if text is None:
            beginnings = beginnings_of(self._source)
            name = SAMPLES_WITHOUT_TOKENIZER if beginnings is None else SAMPLES_OF_MODEL
            prefix = () if beginnings is None else beginnings.text
            self._windows = _draw_windows(torch, model, prefix, (count, window), progress)
        else:
            location = Location.parse(text)
            name = location.display
            self._windows = read_windows(load_tokenizer(self._source), location, Protocol(window, count))
        require_vocabulary(model, self._windows.tokens)
        self.over = f"{len(self._windows)} windows of {window} tokens of {name}"
        if self._windows.prefix:
            self.over += f", each after {prefix_text(self._windows.prefix)}"

    def __call__(self, path: str, *, alone: bool) -> Kl:
        """Return the divergence of the model at ``path``.

        If ``alone`` is set, the path is a file of weights, and the source's config is used.
        """
        if not alone:
            return self._measure(replace(self._reference, path=path))
        with companions_folder(self._source) as folder:
            return self._measure(replace(self._reference, path=path, model_dir=Location.in_store(folder)))

    def _measure(self, options: LoadOptions) -> Kl:
        torch = require("torch", EXTRA)
        model = load_model(options)
        require_window(model, self._windows.length)
        measures = Measures(progress=self._progress)
        _, scores, _ = score_windows(torch, model, self._windows, self._reference, measures)
        return Kl(scores.figures()["kl"], scores.intervals(measures.resamples, measures.seed).get("kl"))


def _draw_windows(
    torch: Any,
    model: Any,
    prefix: tuple[SpecialToken, ...],
    shape: tuple[int, int],
    progress: ProgressCallback | None,
) -> Windows:
    """Return windows of tokens that the model generates, with a seed that no calibration uses."""
    ids, (count, length) = tuple(token.id for token in prefix), shape
    text_length_of_window(length, Surrounding(ids))
    with seeded(torch, HELD_OUT):
        tokens = draw_samples(torch, model, (count, length), Progress(count * length, progress), ids)
    return Windows(tokens, prefix)
