"""The views of a conversion, between opening and planning: as the options and the target's program require."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from ingot.artifacts.attachments import KINDS, WITH_WEIGHTS, located, require_carried
from ingot.artifacts.companions import companion_config, holds_a_model
from ingot.artifacts.destination import Destination
from ingot.artifacts.draft_head import check_head
from ingot.conversion.importance import read_importance
from ingot.conversion.onnx.graphs import as_graph, as_weights
from ingot.conversion.onnx.into_graph import place_in_graph
from ingot.conversion.options import ConvertOptions
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.recipes.recipe import Recipe
from ingot.translate.apart import experts_for
from ingot.translate.companions import RULE
from ingot.translate.mlx_families import for_mlx, is_opened
from ingot.translate.unknown import RULE as UNKNOWN
from ingot.translate.unknown import kept_note
from ingot.translate.view import is_translated, to_gguf, to_model
from ingot.views.attach import attach, describe, detach
from ingot.views.names import omit
from ingot.views.pruning.prune import BLOCK, PruneOptions, choose_pruning
from ingot.views.regrouped import regroup, smaller_groups
from ingot.views.values import prune, weigh

_HINT = " (--keep-names leaves them as they are)"


def prepare_source(
    opened: Checkpoint,
    target: Destination,
    options: ConvertOptions,
    without: Mapping[str, Omission],
    planned: Collection[str] = (),
) -> View:
    """Return the view of an opened checkpoint that a conversion without quantizers writes.

    It is ``view_weights``, ``view_for_target`` and ``regroup`` in turn; arguments and errors are described there.
    """
    view = view_weights(opened, target, options, without)
    view = view.then(partial(view_for_target, target=target, options=options, planned=planned))
    return view.then(partial(regroup, groups=groups_for(view.checkpoint, target.format)))


def view_weights(
    opened: Checkpoint, target: Destination, options: ConvertOptions, without: Mapping[str, Omission]
) -> View:
    """Return the weights as quantizers read them: under names of a model folder, less the tensors ``without``, pruned.

    Tensors of a GGUF file get the names of a model folder if the target is a folder, unless the options say to keep
    names. Only known families are translated, and only known families are written for MLX, whose program computes with
    code of the family.

    Pruning reads the feed-forward networks and reports to ``options.progress``. Closing the result closes ``opened``;
    if the function raises, ``opened`` is still the caller's to close.

    Raises
    ------
    UsageError
        ``convert.prune``, ``convert.activations``, ``attachments.none``.
    UnsupportedError
        ``convert.attachment``: the format cannot carry what is to be attached; ``architecture.*``: the target's program
        would not open the result.
    """
    require_carried(target.format, _attachments(options))
    omitted = View(omit(opened, without))
    if options.keep_names:
        view = omitted.then(partial(_as_model, target=target, options=options))
    else:
        view = omitted.then(partial(as_weights, place=target))
        view = view.then(partial(_as_model, target=target, options=options)).then(partial(_with_experts, target=target))
    return view.then(partial(_for_mlx, target=target, options=options)).then(partial(_pruned, options=options))


def view_for_target(
    checkpoint: Checkpoint, target: Destination, options: ConvertOptions, planned: Collection[str] = ()
) -> View:
    """Return the weights of ``view_weights``, rounded or not, as the target's program reads them but for groups.

    Attachments and metadata are those of the options. Tensors of a model folder get llama.cpp's names in GGUF, unless
    the options say to keep names. Matrices of an ONNX graph are transposed if its operators require it: as the loaded
    recipe of the options decides, or as the tensor names ``planned`` of an earlier plan show.

    Closing the result closes ``checkpoint``.

    Raises
    ------
    UsageError
        ``convert.importance``, ``attachments.none``, ``convert.graph``.
    UnsupportedError
        ``architecture.*``: the target's program would not open the result.
    FormatError
        ``draft.*``, ``attachments.coreml-package``, ``archive.*``; and the errors of opening attachments.
    """
    format, paths = target.format, _attachments(options)
    view = View(checkpoint)
    if options.importance is not None:
        view = view.then(partial(weigh, importance=read_importance(options.importance, checkpoint)))
    attachments = view.checkpoint.attachments
    dropped = [kind for kind in attachments.kinds() if kind not in format.traits.attachments]
    if dropped:
        view = view.then(partial(detach, kinds=dropped))
        attachments = view.checkpoint.attachments
    if attachments.draft is not None and "draft" not in paths:
        with located("draft head"):
            check_head(attachments.draft)
    graph = paths.pop("graph", None)
    if paths:
        view = view.then(partial(attach, **paths))
    if options.metadata:
        view = view.then(partial(describe, metadata=options.metadata))
    if graph is not None:
        view = view.then(partial(place_in_graph, path=graph))
    recipe = options.recipe if isinstance(options.recipe, Recipe) else None
    requantize = options.allow_requantize
    view = view.then(partial(as_graph, place=target, recipe=recipe, planned=planned, requantize=requantize))
    view = view.then(partial(_as_gguf, target=target, options=options))
    lost = [kind for kind in dropped if kind not in WITH_WEIGHTS]
    return view.with_notes(*(f"{format.name} holds weights alone, not the {KINDS[kind]}" for kind in lost))


def groups_for(checkpoint: Checkpoint, format: Format) -> Mapping[str, int]:
    """Return the tensors that need smaller groups of columns in a format, and the columns of a group there."""
    sizes = format.traits.group_sizes
    return {} if sizes is None else smaller_groups(checkpoint, sizes, one=format.traits.one_group)


def _attachments(options: ConvertOptions) -> dict[str, Any]:
    return {kind: path for kind in KINDS if (path := getattr(options, kind, None)) is not None}


def _as_model(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return the checkpoint of a GGUF file with the names and files of a model folder, if the target needs them."""
    names = target.directory or options.graph is not None
    if not holds_a_model(view.format) or holds_a_model(target.format.name) or not names:
        return View(view)
    if options.keep_names:
        return View(view, [kept_note(target.format.name)] if target.directory else [])
    try:
        return to_model(view, no_tokenizer=options.no_tokenizer, hint=_HINT)
    except UnsupportedError as error:
        if target.directory or error.rule != UNKNOWN:
            raise
        return View(view)  # a graph takes tensors by name, and refuses unknown names


def _with_experts(view: Checkpoint, target: Destination) -> View:
    """Return the checkpoint with experts as the programs store them that read such folders; GGUF has its own names."""
    if holds_a_model(view.format) or not (target.directory or holds_a_model(target.format.name)):
        return View(view)
    return experts_for(view, target.format.name, hint=_HINT)


def _for_mlx(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return the checkpoint without tensors that mlx_lm refuses; the checkpoint itself for other formats."""
    if target.format.name != MlxFormat.name or not target.directory:
        return View(view)
    config = companion_config(view.companions, RULE)
    if not options.keep_names:
        return View(for_mlx(view, config))
    return View(view, [] if is_opened(config) else [kept_note(MlxFormat.name)])


def _as_gguf(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return the checkpoint of a model folder as llama.cpp reads it; the checkpoint itself for other formats."""
    if not holds_a_model(target.format.name) or is_translated(view):
        return View(view)
    if options.keep_names:
        return View(view, [kept_note(target.format.name)])
    return to_gguf(view, no_tokenizer=options.no_tokenizer, hint=_HINT)


def _pruned(view: Checkpoint, options: ConvertOptions) -> View:
    if options.prune is None:
        if options.prune_block is not None or options.activations is not None:
            raise UsageError("expected a fraction to prune beside its options, found none", rule="convert.prune")
        return View(view)
    block = BLOCK if options.prune_block is None else options.prune_block
    how = PruneOptions(options.prune, block, None, options.threads)
    plan = choose_pruning(view, how, options.activations, options.progress)
    return View(prune(view, plan.tensors), plan.notes, plan.read)
