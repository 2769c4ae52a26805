"""Rules of a recipe that name a quantizer: matrices are rounded in a view, before the plan, whatever the container."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ingot.conversion.encoding import stored_exactly
from ingot.conversion.options import ConvertOptions
from ingot.conversion.plan import decide, layers_of
from ingot.core.registry import Registry
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import WINDOW_PREFIX, Statistics
from ingot.quantization.choice import QuantizerSpec, parse_quantizer
from ingot.quantization.outcome_text import few, outcome_lines
from ingot.quantization.tensor import Outcome, StatisticsSource
from ingot.recipes.choice import WEIGHT_DTYPES, Choice
from ingot.recipes.recipe import Recipe, Rotate
from ingot.stores.table import location_of
from ingot.views.folding.fold import changed_names
from ingot.views.folding.graph import Graph, graph_of
from ingot.views.folding.rotate import Rotated, rotated
from ingot.views.folding.scale import ScaleFolding, Searched, scaled, scales
from ingot.views.folding.statistics import FoldedStatistics
from ingot.views.rounded_view import Known, Rounding, round_to

# Who runs models lies above this room.
_CALIBRATE: Registry[Any] = Registry("calibration", (("model", "ingot.runtime.calibration.calibrate:statistics_of"),))
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


@dataclass(frozen=True, slots=True)
class Turned:
    """A checkpoint as a recipe turns it, in the element types that it had; itself where it does not."""

    checkpoint: Checkpoint
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Folds:
    """A checkpoint with everything folded in, in f32 where it is to be rounded, and its statistics.

    ``told`` returns lines on the scales once matrices were read; ``dtypes`` are what tensors' element types were.
    """

    checkpoint: Checkpoint
    known: Known
    dtypes: Mapping[str, str]
    told: Callable[[], Sequence[str]] | None = None


def turned_first(recipe: Recipe | None, rotate: str | None) -> Recipe | None:
    """Return a recipe, or none but that, which turns the model first; ``UsageError`` ``recipe.rotate``: twice."""
    if rotate is None:
        return recipe
    if recipe is not None and recipe.rotate is not None:
        raise UsageError(
            f"expected one of --rotate and the table [rotate], found both in {recipe.name}", rule="recipe.rotate"
        )
    return replace(recipe or Recipe("rotate", ()), rotate=Rotate.of(rotate))


def turned(view: Checkpoint, recipe: Recipe | None) -> Turned:
    """Return the checkpoint as a recipe turns it; raises what ``rotate`` raises."""
    if recipe is None or recipe.rotate is None:
        return Turned(view)
    graph = graph_of(view)
    found = _rotated(view, recipe.rotate, graph, _stated(view, graph))
    return Turned(found.checkpoint, found.notes)


def folded(
    view: Checkpoint,
    recipe: Recipe,
    choices: Mapping[str, QuantizerSpec],
    known: Callable[[], StatisticsSource],
    said: str,
) -> Folds:
    """Return a checkpoint with all folded in that a recipe asks for.

    Parameters
    ----------
    view : Checkpoint
        As it was opened.
    recipe : Recipe
    choices : mapping of name to QuantizerSpec
        What is rounded, under the names of the turned checkpoint.
    known : callable
        Returns the statistics of ``view``.
    said : str
        What tells them from others.
    """
    grids = {name: each.grid for name, each in choices.items() if each.scaled}
    if recipe.rotate is None and not grids:
        return Folds(view, known, {})
    graph = graph_of(view)
    stated = _stated(view, graph)
    dtypes = {name: "f32" if name in choices else dtype for name, dtype in stated.items()}
    knowing = known
    if recipe.rotate is not None:
        # What scales are folded into afterwards is not rounded in between.
        between = set(changed_names(graph, lambda stream: scales(graph, grids, stream)))
        whole = {name: "f32" if name in between else dtype for name, dtype in dtypes.items()}
        first = _rotated(view, recipe.rotate, graph, whole)
        view, knowing = first.checkpoint, _through(known, first)
    if not grids:
        return Folds(view, knowing, stated)
    folding = ScaleFolding(view, graph, grids, knowing, dtypes)
    return Folds(
        scaled(folding, said), lambda: FoldedStatistics(knowing(), folding), stated, partial(_told, folding.searched)
    )


def _told(searched: Searched) -> Sequence[str]:
    gains = list(searched.gains.values())
    if not gains:
        return []
    moved, mean = sum(gain < 1 for gain in gains), sum(gains) / len(gains)
    done = f"{moved} of {len(gains)} groups of matrices got scales for their channels, folded into what comes before"
    return [f"{done}; they leave {mean:.1%} of the error of nearest rounding on average"]


def _rotated(view: Checkpoint, asked: Rotate, graph: Graph, dtypes: Mapping[str, str]) -> Rotated:
    return rotated(view, graph, (asked.r1, asked.r2, asked.seed), dtypes)


def _through(known: Callable[[], StatisticsSource], first: Rotated) -> Known:
    return lambda: FoldedStatistics(known(), first.folding)


def _stated(view: Checkpoint, graph: Graph) -> dict[str, str]:
    names = [*graph.sites, graph.head]
    return {name: view[name if name in view else graph.embedding].dtype for name in names}
