"""How far models are from one source: what budgets are checked by (``spec/budgets.md``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.conversion.budget.divergence import Kl
from ingot.core.border import require
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.runtime.calibration.calibration import LENGTH, SAMPLES
from ingot.runtime.calibration.samples import HELD_OUT, SAMPLES_OF_MODEL, SAMPLES_WITHOUT_TOKENIZER, samples_of, seeded
from ingot.runtime.evaluation.evaluate import require_window, scored
from ingot.runtime.evaluation.generate import positions, require_room, require_vocabulary
from ingot.runtime.evaluation.special_tokens import SpecialToken, Surrounding, prefix_text
from ingot.runtime.evaluation.windows import Windows, read_windows, require_room_for_text, sample_prefix
from ingot.runtime.loading.model_source import companions_folder
from ingot.runtime.loading.options import LoadOptions, Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import AnyPath, Location


class Divergence:
    """Measures KL(source || model) as ``evaluate`` does, in f32, on windows that are the same for all models.

    Parameters
    ----------
    source : path
        The model to compare with; loaded anew for each, so that conversions between have the memory.
    text : path or None
        Text to read; None: the source draws samples, by a seed of its own.
    sequences : int or None
        Windows of 256 tokens, or of what the model has positions for; 96 by default, fewer where a text is short.
    progress : callable, optional

    Raises
    ------
    UnsupportedError
        ``generate.no-head``: no language model.
    UsageError
        ``eval.text``, ``eval.vocabulary``.
    IngotError
        As ``load_model``.
    """

    def __init__(
        self, source: AnyPath, text: AnyPath | None, sequences: int | None, *, progress: ProgressCallback | None = None
    ) -> None:
        torch = require("torch", EXTRA)
        self._source, self._progress = Location.parse(source), progress
        self._reference = LoadOptions(self._source, dtype="f32", keep_packed=False, cache=False)
        model = load_model(self._reference)
        require_room(model, 1, 0)
        most, count = positions(model), sequences or SAMPLES
        window = LENGTH if most is None else min(LENGTH, most)
        if text is None:
            prefix = sample_prefix(self._source)
            name = SAMPLES_WITHOUT_TOKENIZER if prefix is None else SAMPLES_OF_MODEL
            self._windows = _drawn(torch, model, prefix or (), (count, window), progress)
        else:
            location = Location.parse(text)
            name = location.display
            self._windows = read_windows(load_tokenizer(self._source), location, Protocol(window, count))
        require_vocabulary(model, self._windows.tokens)
        self.over = f"{len(self._windows)} windows of {window} tokens of {name}"
        if self._windows.prefix:
            self.over += f", each after {prefix_text(self._windows.prefix)}"

    def __call__(self, path: str, *, alone: bool) -> Kl:
        """Return the divergence of the model at ``path``, with the source's config where it is a file ``alone``."""
        if not alone:
            return self._of(replace(self._reference, path=path))
        with companions_folder(self._source) as folder:
            return self._of(replace(self._reference, path=path, model_dir=Location.in_store(folder)))

    def _of(self, options: LoadOptions) -> Kl:
        torch = require("torch", EXTRA)
        model = load_model(options)
        require_window(model, self._windows.length)
        measures = Measures(progress=self._progress)
        _, scores, _ = scored(torch, model, self._windows, self._reference, measures)
        return Kl(scores.figures()["kl"], scores.intervals(measures.resamples, measures.seed).get("kl"))


def _drawn(
    torch: Any,
    model: Any,
    prefix: tuple[SpecialToken, ...],
    shape: tuple[int, int],
    progress: ProgressCallback | None,
) -> Windows:
    """Return windows that the model draws, others than those of any calibration."""
    ids, (count, length) = tuple(token.id for token in prefix), shape
    require_room_for_text(length, Surrounding(ids))
    with seeded(torch, HELD_OUT):
        tokens = samples_of(torch, model, count, length, Progress(count * length, progress), ids)
    return Windows(tokens, prefix)
