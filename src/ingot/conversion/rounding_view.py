"""Rules of a recipe that name a quantizer: matrices are rounded in a view, before the plan, whatever the container."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ingot.codecs.table import stored_exactly
from ingot.conversion.options import ConvertOptions
from ingot.conversion.plan import decide, layers_of
from ingot.core.registry import Registry
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.model.statistics import WINDOW_PREFIX, Statistics
from ingot.quantization.choice import QuantizerSpec, parse_quantizer
from ingot.quantization.outcome_text import few, outcome_lines
from ingot.quantization.tensor import Outcome
from ingot.recipes.choice import WEIGHT_DTYPES, Choice
from ingot.recipes.recipe import Recipe, Rotate
from ingot.stores.location import Location
from ingot.views.folding.fold import Folding, changed_names
from ingot.views.folding.graph import Graph, graph_of
from ingot.views.folding.rotate import rotated
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
        self._checkpoint = checkpoint
        self._options = options
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


def round_weights(
    checkpoint: Checkpoint, recipe: Recipe | None, options: ConvertOptions
) -> tuple[View, Rounding | None]:
    """Return the model with the matrices rounded whose rules name a quantizer, and the rounding.

    The recipe's rotations and scales are folded in first. Without matrices to round there is no rounding.

    Raises
    ------
    UsageError
        ``convert.requantize``: such a matrix is quantized already; ``convert.calibration``: statistics for a recipe
        without a quantizer; what ``Statistics.open`` raises.
    UnsupportedError
        ``fold.*``.
    """
    view = rotate_by_recipe(checkpoint, recipe)
    choices = dict(_choices(view.checkpoint, recipe, options)) if recipe is not None else {}
    calibration = options.calibration
    if recipe is None or not choices:
        if calibration is not None:
            raise UsageError(
                "expected a recipe with a quantizer beside --calibration, such as q4_0-calibrated; found none that "
                "hits a matrix",
                rule="convert.calibration",
            )
        return view, None
    statistics = _Known(checkpoint, options)
    notes = list(view.notes)
    if calibration is not None:
        opened = statistics()  # another model's are refused before anything is read
        notes += [_NO_PREFIX] if opened.model_id is not None and WINDOW_PREFIX not in opened.metadata else []
    if calibration is None or isinstance(calibration, Statistics):
        metadata = calibration.metadata if isinstance(calibration, Statistics) else {}
        source = metadata.get("source", "samples of the model")
    else:
        source = Location.parse(calibration).display
    rounding = Rounding(choices, statistics, source, statistics.close, at_hand=calibration is not None)
    folded, rounding = fold_model(checkpoint, recipe, rounding)
    return View(round_to(folded, rounding), notes), rounding


def _choices(view: Checkpoint, recipe: Recipe, options: ConvertOptions) -> Sequence[tuple[str, QuantizerSpec]]:
    layer_count = layers_of(view)
    found = []
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


def with_rotate_option(recipe: Recipe | None, rotate: str | None) -> Recipe | None:
    """Return the recipe with the rotations of ``--rotate``; the recipe itself if the option is not set.

    Raises ``UsageError`` ``recipe.rotate`` if the recipe has a table ``[rotate]`` too.
    """
    if rotate is None:
        return recipe
    if recipe is not None and recipe.rotate is not None:
        raise UsageError(
            f"expected one of --rotate and the table [rotate], found both in {recipe.name}", rule="recipe.rotate"
        )
    return replace(recipe or Recipe("rotate", ()), rotate=Rotate.of(rotate))


def rotate_by_recipe(checkpoint: Checkpoint, recipe: Recipe | None) -> View:
    """Return the model rotated as the recipe requires, in its own element types; raises the errors of ``rotate``."""
    if recipe is None or recipe.rotate is None:
        return View(checkpoint)
    graph = graph_of(checkpoint)
    return rotated(checkpoint, graph, _options(recipe.rotate), _dtypes_of(checkpoint, graph))[0]


def fold_model(checkpoint: Checkpoint, recipe: Recipe, rounding: Rounding) -> tuple[Checkpoint, Rounding]:
    """Return the model with the recipe's rotations and scales folded in, and the rounding of its matrices.

    Matrices to round are in f32. The returned rounding has statistics of the changed model, the element types that the
    matrices had, and notes on the scales.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model without any of the changes.
    recipe : Recipe
    rounding : Rounding
        Choices by the names of the rotated model; statistics of ``checkpoint``.
    """
    choices = rounding.choices
    grids = {name: choice.grid for name, choice in choices.items() if choice.scaled}
    if recipe.rotate is None and not grids:
        return checkpoint, rounding
    graph = graph_of(checkpoint)
    stored = _dtypes_of(checkpoint, graph)
    dtypes = {name: "f32" if name in choices else dtype for name, dtype in stored.items()}
    rounding = replace(rounding, dtypes=stored)
    if recipe.rotate is not None:
        # Tensors that scales are folded into afterwards are not rounded in between.
        scaled_names = set(changed_names(graph, lambda stream: scales(graph, grids, stream)))
        exact = {name: "f32" if name in scaled_names else dtype for name, dtype in dtypes.items()}
        view, rotations = rotated(checkpoint, graph, _options(recipe.rotate), exact)
        checkpoint = view.checkpoint
        rounding = replace(rounding, known=_folded_statistics(rounding.known, rotations))
    if not grids:
        return checkpoint, rounding
    folding = ScaleFolding(checkpoint, graph, grids, rounding.known, dtypes)
    rounding = replace(
        rounding, known=_folded_statistics(rounding.known, folding), more=partial(_scale_notes, folding.searched)
    )
    return scaled(folding, rounding.said), rounding


def _scale_notes(searched: Searched) -> Sequence[str]:
    gains = list(searched.gains.values())
    if not gains:
        return []
    changed = sum(gain < 1 for gain in gains)
    mean = sum(gains) / len(gains)
    groups = (
        f"{changed} of {len(gains)} groups of matrices got scales for their channels, folded into what comes before"
    )
    return [f"{groups}; they leave {mean:.1%} of the error of nearest rounding on average"]


def _options(rotate: Rotate) -> tuple[bool, bool, int]:
    return rotate.r1, rotate.r2, rotate.seed


def _folded_statistics(statistics: Known, folding: Folding) -> Known:
    return lambda: FoldedStatistics(statistics(), folding)


def _dtypes_of(checkpoint: Checkpoint, graph: Graph) -> dict[str, str]:
    """Return the element types of the graph's tensors; a head without a tensor has that of the embedding."""
    names = [*graph.sites, graph.head]
    return {name: checkpoint[name if name in checkpoint else graph.embedding].dtype for name in names}
