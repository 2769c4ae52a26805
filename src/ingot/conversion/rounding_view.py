"""The view that rounds the matrices with a quantizer in their rule; it does not depend on the format or the plan."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ingot.artifacts.destination import CPU
from ingot.codecs.range_probe import HALF
from ingot.codecs.table import stored_exactly
from ingot.conversion.options import ConvertOptions
from ingot.conversion.plan import decide, layers_of
from ingot.conversion.round_by_layers import calibration_of
from ingot.core.runtime.device import resolve_device
from ingot.errors import UnsupportedError, UsageError
from ingot.model.calibration import Calibration
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.model.statistics import WINDOW_PREFIX, Statistics
from ingot.quantization.choice import QuantizerSpec, parse_quantizer
from ingot.quantization.outcome_text import few, outcome_lines
from ingot.quantization.tensor import Outcome, StatisticsSource
from ingot.recipes.choice import WEIGHT_DTYPES, Choice
from ingot.recipes.recipe import STATIC_ACTIVATIONS, Recipe, Rotate
from ingot.stores.location import Location
from ingot.views.folding.fold import Folding, changed_names
from ingot.views.folding.graph import Graph, graph_of
from ingot.views.folding.rotate import fold_rotations
from ingot.views.folding.scale import ScaleFolding, ScaleSearch, fold_scales, has_scales
from ingot.views.folding.statistics import FoldedStatistics
from ingot.views.rounded_view import LoadStatistics, Rounding, round_to

_SAMPLES = "samples of the model"
_NO_PREFIX = (
    "the statistics do not declare how their windows begin; those of earlier releases begin without BOS: if the "
    "tokenizer puts BOS before a text, calibrate again"
)


def rounding_notes(rounding: Rounding) -> list[str]:
    """Return notes on rounded matrices for the report; to be called after the matrices were read."""
    outcomes = outcomes_of(rounding)
    if not outcomes:
        return []
    more = [] if rounding.extra_notes is None else rounding.extra_notes()
    lines = [*outcome_lines(outcomes, rounding.statistics_id), *_bias_lines(rounding.bias_changes), *more]
    on_cpu = [name for name, spec in sorted(rounding.choices.items()) if not spec.on_device]
    if rounding.device is not None and on_cpu:
        lines.append(f"rounded on the CPU, because {rounding.device} has no rounding to their type: {few(on_cpu)}")
    return lines


def _bias_lines(corrected: Mapping[str, float | None]) -> list[str]:
    changes = [change for change in corrected.values() if change is not None]
    plain = sorted(name for name, change in corrected.items() if change is None)
    lines = [f"{len(changes)} biases were corrected, by {max(changes):.3g} at most"] if changes else []
    return [*lines, f"without means of inputs, not corrected; calibrate again: {few(plain)}"] if plain else lines


def outcomes_of(rounding: Rounding) -> Sequence[Outcome]:
    """Return the outcomes of the rounded matrices, sorted by name."""
    return [rounding.outcomes[name] for name in sorted(rounding.outcomes)]


class _LazyStatistics:
    """The model's statistics, opened or collected on the first call. Calls from several threads are safe."""

    def __init__(self, checkpoint: Checkpoint, options: ConvertOptions) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._lock = threading.Lock()
        self._statistics: Statistics | None = None

    def __call__(self) -> Statistics:
        with self._lock:
            if self._statistics is None:
                calibration = self._options.calibration
                if isinstance(calibration, Statistics):
                    self._statistics = calibration
                elif calibration is None or isinstance(calibration, Calibration):
                    self._statistics = requested_calibration(self._options).collect()
                else:
                    self._statistics = Statistics.open(calibration, self._checkpoint)
            return self._statistics

    def replace(self, statistics: StatisticsSource) -> None:
        """Use other statistics for all matrices that are read from now on."""
        assert isinstance(statistics, Statistics)
        with self._lock:
            self._statistics = statistics

    def close(self) -> None:
        """Close the statistics unless the caller passed them in the options."""
        if self._statistics is not None and self._statistics is not self._options.calibration:
            self._statistics.close()


def requested_calibration(options: ConvertOptions) -> Calibration:
    """Return the calibration that the options contain; by default one over text that the model generates."""
    if isinstance(options.calibration, Calibration):
        return options.calibration
    return calibration_of(options.src, max_ram=options.max_ram, progress=options.progress, device=options.device)


def round_weights(
    checkpoint: Checkpoint, recipe: Recipe | None, options: ConvertOptions, *, f16_scales: bool = False
) -> tuple[View, Rounding | None]:
    """Return a view that rounds the matrices to which rules with a quantizer apply, and the state of the rounding.

    The recipe's rotations and scales are folded in first. The rounding is None if there are no matrices to round.
    ``f16_scales`` is true if the target stores all scales as f16. Then a rule with ``scales = "half"`` gives f16 also
    for weights in bf16.

    Raises
    ------
    UsageError
        ``convert.requantize``: a matrix to round is already quantized; ``convert.calibration``: statistics for a recipe
        without a quantizer; ``convert.device``: a device for such a recipe; ``model.device``; the errors of
        ``Statistics.open``.
    UnsupportedError
        ``fold.*``, ``quantizer.matrix``.
    """
    view = rotate_by_recipe(checkpoint, recipe)
    choices = dict(_choices(view.checkpoint, recipe, options, f16_scales=f16_scales)) if recipe is not None else {}
    calibration = None if isinstance(options.calibration, Calibration) else options.calibration
    if recipe is None or not choices:
        if options.calibration is not None:
            raise UsageError(
                "--calibration needs a recipe with a quantizer that hits a matrix, such as q4_0-calibrated",
                rule="convert.calibration",
            )
        budgets = options.target_size, options.target_bpw, options.max_kl
        if options.device != CPU and budgets == (None, None, None):
            raise UsageError(
                f"--device {options.device} is for recipes with a quantizer that hits a matrix, such as "
                "q4_0-calibrated; other conversions compute on the CPU: leave it out",
                rule="convert.device",
            )
        return view, None
    device = None if options.device == CPU else resolve_device(options.device)
    device = None if device is None or device.type == CPU else device
    statistics = _LazyStatistics(checkpoint, options)
    notes = list(view.notes)
    if calibration is not None:
        opened = statistics()  # statistics of another model raise an error here, before any tensor is read
        notes += [_NO_PREFIX] if opened.model_id is not None and WINDOW_PREFIX not in opened.metadata else []
    if isinstance(options.calibration, Calibration):
        source = options.calibration.source
    elif calibration is None:
        source = _SAMPLES
    elif isinstance(calibration, Statistics):
        source = calibration.metadata.get("source", _SAMPLES)
    else:
        source = Location.parse(calibration).display
    merged = {name: base.dtype for name in choices if (base := view.checkpoint[name].stored_like) is not None}
    coded = any(spec.grid.coded is not None for spec in choices.values())  # their step needs all statistics
    rounding = Rounding(
        choices,
        statistics,
        source,
        statistics.close,
        dtypes=merged,
        statistics_ready=calibration is not None,
        input_scales=recipe.activations in STATIC_ACTIVATIONS,
        replace_statistics=statistics.replace if calibration is None and not coded else None,
        device=device,
        threads=options.threads,
    )
    folded, rounding = fold_model(checkpoint, recipe, rounding)
    return View(round_to(folded, rounding), notes), rounding


def _choices(
    view: Checkpoint, recipe: Recipe, options: ConvertOptions, *, f16_scales: bool
) -> Sequence[tuple[str, QuantizerSpec]]:
    """Return the names and quantizers of the matrices to which rules with a quantizer apply."""
    layer_count = layers_of(view)
    specs = []
    for name, tensor in view.items():
        choice = decide(view, name, recipe, layer_count).choice
        if not isinstance(choice, Choice) or choice.quantizer is None:
            continue
        if len(tensor.shape) < 2 or not tensor.size or tensor.dtype not in WEIGHT_DTYPES:
            raise UnsupportedError(
                f"expected a matrix of weights for quantizer {choice.quantizer}, found {tensor.dtype} of shape "
                f"{list(tensor.shape)}; add min_ndim = 2 to the rule",
                rule="quantizer.matrix",
                where=name,
            )
        if not stored_exactly(tensor) and not options.allow_requantize:
            raise UsageError(
                "expected weights that are not quantized, found integers; --allow-requantize quantizes them again",
                rule="convert.requantize",
                where=name,
            )
        quantizer_options = choice.options
        if (
            quantizer_options.get("scales") == HALF
            and (tensor.stored_like or tensor).dtype == "bf16"
            and not f16_scales
        ):
            quantizer_options = {**quantizer_options, "scales": "bf16"}
        spec = parse_quantizer(choice.quantizer, choice.codec, quantizer_options)
        spec.require(tensor.shape, name)
        specs.append((name, spec))
    return specs


def with_rotate_option(recipe: Recipe | None, rotate: str) -> Recipe:
    """Return the recipe with the rotations of ``--rotate``; without a recipe, one that only rotates.

    Raises ``UsageError`` ``recipe.rotate`` if the recipe has a table ``[rotate]`` too.
    """
    if recipe is not None and recipe.rotate is not None:
        raise UsageError(
            f"expected one of --rotate and the table [rotate], found both in {recipe.name}", rule="recipe.rotate"
        )
    return replace(recipe or Recipe("rotate", ()), rotate=Rotate.parse(rotate))


def rotate_by_recipe(checkpoint: Checkpoint, recipe: Recipe | None) -> View:
    """Return the model rotated as the recipe requires, in the dtypes of its tensors; raise the errors of ``rotate``."""
    if recipe is None or recipe.rotate is None:
        return View(checkpoint)
    graph = graph_of(checkpoint)
    return fold_rotations(checkpoint, graph, _options(recipe.rotate), _dtypes_of(checkpoint, graph))[0]


def fold_model(checkpoint: Checkpoint, recipe: Recipe, rounding: Rounding) -> tuple[Checkpoint, Rounding]:
    """Return the model with the recipe's rotations and scales folded in, and the rounding of its matrices.

    The matrices to round are f32 in the result. The returned rounding has statistics of the folded model, the dtypes of
    the source's matrices, and notes on the scales.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model before folding.
    recipe : Recipe
    rounding : Rounding
        Its quantizers are keyed by the names of the rotated model; its statistics are those of ``checkpoint``.
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
        # A tensor into which scales are folded later stays f32 until then, so that it is rounded only once.
        scaled_names = set(changed_names(graph, lambda stream: has_scales(graph, grids, stream)))
        exact = {name: "f32" if name in scaled_names else dtype for name, dtype in dtypes.items()}
        view, rotations = fold_rotations(checkpoint, graph, _options(recipe.rotate), exact)
        checkpoint = view.checkpoint
        folded = _folded_statistics(rounding.load_statistics, rotations)
        rounding = replace(rounding, load_statistics=folded, replace_statistics=None)
    if not grids:
        return checkpoint, rounding
    folding = ScaleFolding(checkpoint, graph, grids, rounding.load_statistics, dtypes, rounding.device)
    rounding = replace(
        rounding,
        load_statistics=_folded_statistics(rounding.load_statistics, folding),
        replace_statistics=None,
        extra_notes=partial(_scale_notes, folding.search),
    )
    return fold_scales(folding, rounding.statistics_id), rounding


def _scale_notes(search: ScaleSearch) -> Sequence[str]:
    gains = list(search.gains.values())
    if not gains:
        return []
    changed = sum(gain < 1 for gain in gains)
    mean = sum(gains) / len(gains)
    groups = f"{changed} of {len(gains)} groups of matrices got channel scales, folded into the preceding module"
    return [f"{groups}; on average {mean:.1%} of the error of nearest rounding remains"]


def _options(rotate: Rotate) -> tuple[bool, bool, int]:
    return rotate.r1, rotate.r2, rotate.seed


def _folded_statistics(statistics: LoadStatistics, folding: Folding) -> LoadStatistics:
    return lambda: FoldedStatistics(statistics(), folding)


def _dtypes_of(checkpoint: Checkpoint, graph: Graph) -> dict[str, str]:
    """Return the dtypes of the graph's tensors; a tied head has the dtype of the embedding."""
    names = [*graph.sites, graph.head]
    return {name: checkpoint[name if name in checkpoint else graph.embedding].dtype for name in names}
