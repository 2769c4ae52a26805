"""Rules of a recipe that name a quantizer: matrices are rounded in a view, before the plan, whatever the container."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.core.registry import Registry
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import WINDOW_PREFIX, Statistics
from ingot.ops.convert.chosen import stored_exactly
from ingot.ops.convert.folding import folded, turned
from ingot.ops.convert.options import ConvertOptions
from ingot.ops.convert.plan import decide, layers_of
from ingot.ops.rounded import few, outcome_lines
from ingot.ops.views.rounded import Rounding, round_to
from ingot.quantizers.choice import QuantizerSpec, parse_quantizer
from ingot.quantizers.tensor import Outcome
from ingot.recipes.choice import WEIGHT_DTYPES, Choice
from ingot.recipes.recipe import Recipe
from ingot.stores.table import location_of

# Who runs models lies above this room.
_CALIBRATE: Registry[Any] = Registry("calibration", (("model", "ingot.adapters.calibrate:statistics_of"),))
_NO_PREFIX = (
    "the statistics do not state what their windows begin with; those of earlier releases begin without BOS: if the "
    "tokenizer puts BOS before a text, calibrate again"
)


def told(rounding: Rounding | None) -> list[str]:
    """Return lines for the report of a conversion, once its matrices were read."""
    every = outcomes_of(rounding)
    if rounding is None or not every:
        return []
    more = [] if rounding.more is None else rounding.more()
    return [*outcome_lines(every, rounding.said), *_bias_lines(rounding.corrected), *more]


def _bias_lines(corrected: Mapping[str, float | None]) -> list[str]:
    changes = [change for change in corrected.values() if change is not None]
    plain = sorted(name for name, change in corrected.items() if change is None)
    lines = [f"{len(changes)} biases were corrected, by {max(changes):.3g} at most"] if changes else []
    return [*lines, f"without means of inputs, not corrected; calibrate again: {few(plain)}"] if plain else lines


def outcomes_of(rounding: Rounding | None) -> Sequence[Outcome]:
    """Return what became of the matrices that were rounded, by name."""
    return () if rounding is None else [rounding.outcomes[name] for name in sorted(rounding.outcomes)]


class _Known:
    """Statistics that are opened, or taken, when the first matrix is read."""

    def __init__(self, checkpoint: Checkpoint, options: ConvertOptions) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._lock = threading.Lock()
        self._found: Statistics | None = None

    def __call__(self) -> Statistics:
        with self._lock:
            if self._found is None:
                stated = self._options.calibration
                if isinstance(stated, Statistics):
                    self._found = stated
                elif stated is not None:
                    self._found = Statistics.open(stated, self._checkpoint)
                else:
                    take = _CALIBRATE["model"]
                    self._found = take(self._options.src, max_ram=self._options.max_ram)
            return self._found

    def close(self) -> None:
        """Release what was opened here."""
        if self._found is not None and self._found is not self._options.calibration:
            self._found.close()


@dataclass(frozen=True, slots=True)
class Rounded:
    """A checkpoint as a recipe turns, scales and rounds it, and notes for the report."""

    checkpoint: Checkpoint
    rounding: Rounding | None = None
    notes: Sequence[str] = ()


def rounded(view: Checkpoint, recipe: Recipe | None, options: ConvertOptions) -> Rounded:
    """Return the checkpoint with the matrices rounded that rules with a quantizer hit, all folded in before.

    The checkpoint itself where there is nothing to fold or round.

    Raises
    ------
    UsageError
        ``convert.requantize``: such a matrix is quantized already; ``convert.calibration``: statistics for a recipe
        without a quantizer; what ``Statistics.open`` raises.
    UnsupportedError
        ``fold.*``.
    """
    whole = turned(view, recipe)
    choices = dict(_choices(whole.checkpoint, recipe, options)) if recipe is not None else {}
    if recipe is None or not choices:
        if options.calibration is not None:
            raise UsageError(
                "expected a recipe with a quantizer beside --calibration, such as q4_0-calibrated; found none that "
                "hits a matrix",
                rule="convert.calibration",
            )
        return Rounded(whole.checkpoint, None, whole.notes)
    known = _Known(view, options)
    notes = list(whole.notes)
    if options.calibration is not None:
        statistics = known()  # another model's are refused before anything is read
        notes += [_NO_PREFIX] if statistics.model_id is not None and WINDOW_PREFIX not in statistics.metadata else []
    stated = options.calibration
    source = "samples of the model" if stated is None or isinstance(stated, Statistics) else location_of(stated)
    folds = folded(view, recipe, choices, known, source)
    rounding = Rounding(choices, folds.known, source, known.close, folds.dtypes, folds.told, at_hand=stated is not None)
    return Rounded(round_to(folds.checkpoint, rounding), rounding, notes)


def _choices(view: Checkpoint, recipe: Recipe, options: ConvertOptions) -> Sequence[tuple[str, QuantizerSpec]]:
    layer_count, found = layers_of(view), []
    for name, tensor in view.items():
        choice = decide(view, name, recipe, layer_count).choice
        if not isinstance(choice, Choice) or choice.quantizer is None:
            continue
        if len(tensor.shape) < 2 or not tensor.size or tensor.dtype not in WEIGHT_DTYPES:
            raise UnsupportedError(
                f"expected a matrix of weights for quantizer {choice.quantizer}, found {tensor.dtype} of shape "
                f"{list(tensor.shape)}; let the rule ask for min_ndim = 2",
                rule="quantizer.matrix",
                where=name,
            )
        if not stored_exactly(tensor) and not options.allow_requantize:
            raise UsageError(
                "expected weights that are not quantized, found integers; --allow-requantize quantizes them again",
                rule="convert.requantize",
                where=name,
            )
        wanted = parse_quantizer(choice.quantizer, choice.codec, choice.options)
        wanted.require(tensor.shape, name)
        found.append((name, wanted))
    return found
