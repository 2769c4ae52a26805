"""The views that a conversion's options ask for: between opening and planning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ingot.artifacts.attachments import KINDS, WITH_WEIGHTS, located, require_carried
from ingot.artifacts.companions import companion_config
from ingot.artifacts.destination import Destination
from ingot.artifacts.draft_head import check_head
from ingot.conversion.importance import read_importance
from ingot.conversion.onnx.graphs import as_graph, as_weights
from ingot.conversion.onnx.into_graph import placed
from ingot.conversion.options import ConvertOptions
from ingot.conversion.rounding_view import rounded
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.recipes.recipe import Recipe
from ingot.translate.apart import experts_for
from ingot.translate.companions import RULE
from ingot.translate.mlx_families import for_mlx, is_opened
from ingot.translate.translated import Translated, holds_a_model
from ingot.translate.unknown import RULE as UNKNOWN
from ingot.translate.unknown import kept_note
from ingot.translate.view import is_translated, to_gguf, to_model
from ingot.views.attach import attach, describe, detach
from ingot.views.names import omit
from ingot.views.pruning.prune import BLOCK, PruneOptions, choose_pruning
from ingot.views.regrouped import regroup, smaller_groups
from ingot.views.rounded_view import Rounding
from ingot.views.values import prune, weigh


@dataclass(frozen=True, slots=True)
class Viewed:
    """A checkpoint as it is to be converted, remarks for the report, and the bytes that were read to make it.

    ``weights`` is the checkpoint as quantizers see it: under names of the source. ``inexact`` are tensors whose values
    are equal in their own type, and not all of them in f32. ``regrouped`` are tensors with smaller groups of columns,
    whose scales are repeated.
    """

    checkpoint: Checkpoint
    notes: Sequence[str] = ()
    read: int = 0
    rounding: Rounding | None = None
    weights: Checkpoint | None = None
    inexact: frozenset[str] = frozenset()
    regrouped: Mapping[str, int] = field(default_factory=dict)


def viewed(
    opened: Checkpoint,
    place: Destination,
    options: ConvertOptions,
    without: Mapping[str, Omission],
    planned: Collection[str] = (),
) -> Viewed:
    """Apply what the options ask for to an opened checkpoint, less the tensors ``without``.

    Between a GGUF file and a folder of another format, and from a model's folder into GGUF, tensors get the names of
    the other side, unless the options say to keep them; a family that is not known is refused then, also for MLX, which
    computes with code of the family. Matrices of an ONNX graph are turned where its operators take
    them so: as the recipe decides, which is loaded, or as the tensors ``planned`` before tell.

    Pruning reads the feed-forward networks, and tells ``options.progress``. Closing the result closes what was opened;
    where this raises, ``opened`` is still the caller's.

    Raises
    ------
    UsageError
        ``convert.prune``, ``convert.activations``, ``convert.importance``, ``attachments.none``, ``convert.graph``.
    UnsupportedError
        ``convert.attachment``: the format cannot carry what is to be attached; ``architecture.*``: the target's program
        would not open the result.
    FormatError
        ``draft.*``, ``attachments.coreml-package``, ``archive.*``; and what opening raises.
    """
    paths = {kind: path for kind in KINDS if (path := getattr(options, kind, None)) is not None}
    format = place.format
    require_carried(format, paths)
    left = omit(opened, without)
    here = _as_model(left if options.keep_names else as_weights(left, place), place, options)
    experts = Translated(here.checkpoint) if options.keep_names else _with_experts(here.checkpoint, place)
    pruned = _pruned(experts.checkpoint, options)
    view = pruned.checkpoint
    recipe = options.recipe if isinstance(options.recipe, Recipe) else None
    mlx = _for_mlx(view, place, options)
    view = mlx.checkpoint
    weights = view
    done = rounded(view, recipe, options)
    view = done.checkpoint
    if options.importance is not None:
        view = weigh(view, read_importance(options.importance, view))
    stay = [kind for kind in view.attachments.kinds() if kind not in format.traits.attachments]
    if stay:
        view = detach(view, stay)
    if view.attachments.draft is not None and "draft" not in paths:
        with located("draft head"):
            check_head(view.attachments.draft)
    graph = paths.pop("graph", None)
    if paths:
        view = attach(view, **paths)
    if options.metadata:
        view = describe(view, options.metadata)
    view, stays = (view, "") if graph is None else placed(view, graph)
    view = as_graph(view, place, recipe, planned, requantize=options.allow_requantize)
    there = _as_gguf(view, place, options)
    view = there.checkpoint
    sizes = format.traits.group_sizes
    groups = {} if sizes is None else smaller_groups(view, sizes, one=format.traits.one_group)
    view = regroup(view, groups) if groups else view
    behind = [f"{format.name} holds weights alone, not the {KINDS[kind]}" for kind in stay if kind not in WITH_WEIGHTS]
    behind += [stays] if stays else []
    notes = (*_told(here), *_told(experts), *mlx.notes, *pruned.notes, *done.notes, *_told(there), *behind)
    return Viewed(view, notes, pruned.read, done.rounding, weights, there.rounded, groups)


def _told(translated: Translated) -> list[str]:
    done = [f"{translated.done} (--keep-names leaves them as they are)"] if translated.done else []
    return [*done, *translated.notes]


def _as_model(view: Checkpoint, place: Destination, options: ConvertOptions) -> Translated:
    names = place.directory or options.graph is not None
    if not holds_a_model(view.format) or holds_a_model(place.format.name) or not names:
        return Translated(view)
    if options.keep_names:
        return Translated(view, [kept_note(place.format.name)] if place.directory else [])
    try:
        return to_model(view, no_tokenizer=options.no_tokenizer)
    except UnsupportedError as error:
        if place.directory or error.rule != UNKNOWN:
            raise
        return Translated(view)  # a graph takes tensors by their names, and refuses those that it has not


def _with_experts(view: Checkpoint, place: Destination) -> Translated:
    """Return the checkpoint with experts as the programs have them that read such folders; GGUF has its own names."""
    if holds_a_model(view.format) or not (place.directory or holds_a_model(place.format.name)):
        return Translated(view)
    return experts_for(view, place.format.name)


def _for_mlx(view: Checkpoint, place: Destination, options: ConvertOptions) -> Translated:
    """Return the checkpoint as mlx_lm takes it; itself for other formats."""
    if place.format.name != MlxFormat.name or not place.directory:
        return Translated(view)
    config = companion_config(view.companions, RULE)
    if not options.keep_names:
        return for_mlx(view, config)
    return Translated(view, [] if is_opened(config) else [kept_note(MlxFormat.name)])


def _as_gguf(view: Checkpoint, place: Destination, options: ConvertOptions) -> Translated:
    if not holds_a_model(place.format.name) or is_translated(view):
        return Translated(view)
    if options.keep_names:
        return Translated(view, [kept_note(place.format.name)])
    return to_gguf(view, no_tokenizer=options.no_tokenizer)


def _pruned(view: Checkpoint, options: ConvertOptions) -> Viewed:
    if options.prune is None:
        if options.prune_block is not None or options.activations is not None:
            raise UsageError("expected a fraction to prune beside its options, found none", rule="convert.prune")
        return Viewed(view)
    block = BLOCK if options.prune_block is None else options.prune_block
    how = PruneOptions(options.prune, block, None, options.threads)
    plan = choose_pruning(view, how, options.activations, options.progress)
    return Viewed(prune(view, plan.tensors), plan.notes, plan.read)
