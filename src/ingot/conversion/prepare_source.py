"""The views of a conversion, between opening and planning: as the options and the target's program require."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ingot.artifacts.attachments import KINDS, WITH_WEIGHTS, located, require_carried
from ingot.artifacts.companions import companion_config, holds_a_model
from ingot.artifacts.destination import Destination
from ingot.artifacts.draft_head import check_head
from ingot.artifacts.equal_tensors import alike, equal_values
from ingot.conversion.importance import read_importance
from ingot.conversion.onnx.graphs import as_graph, as_weights
from ingot.conversion.onnx.into_graph import place_in_graph
from ingot.conversion.options import ConvertOptions
from ingot.core.runtime.memory import anonymous_in_use, parse_size
from ingot.core.runtime.parallel import default_workers
from ingot.engine.resources import RESERVE
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import Format, WriteOptions
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.model.tensor import Tensor
from ingot.naming.names import role_of
from ingot.recipes.recipe import Recipe
from ingot.stores.location import Location
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

DEFAULT_SHARD = 5_000_000_000
# What a thread takes that encodes a sample of a tensor, of the widest type, in the ways that a recipe lists.
_PER_SAMPLE = 40 << 20


def within(options: ConvertOptions) -> ConvertOptions:
    """Return the options to plan with: no more threads than may measure samples under the ceiling, but one."""
    if options.max_ram is None:
        return options
    room = parse_size(options.max_ram) - anonymous_in_use() - RESERVE
    return replace(options, threads=max(1, min(options.threads or default_workers(), room // _PER_SAMPLE)))


def write_options(options: ConvertOptions, target: Destination) -> WriteOptions:
    """Return what is asked of the writer; raises ``UsageError`` ``convert.shard``."""
    shard = options.max_shard
    if shard is not None and not (target.directory and target.format.traits.shards):
        raise UsageError(
            f"expected a folder as destination and a format that shards, found format {target.format.name}",
            rule="convert.shard",
            where=target.display,
        )
    usual = DEFAULT_SHARD if target.directory and not target.format.traits.shards_on_request else None
    size = usual if shard is None else parse_size(shard)
    compact = options.prune_compact
    beside = target.directory
    mixture = options.recipe.mixture if isinstance(options.recipe, Recipe) else None
    return WriteOptions(
        digest=options.digest,
        max_shard=size,
        compact=compact,
        siblings=beside,
        base=target.format.base_identity(),
        file_type=None if mixture is None else mixture.file_type,
    )


_RULE = "convert.overlay"


def laid_over(place: Destination, options: ConvertOptions) -> Destination:
    """Return the destination with the format that refers to the file ``overlay``, where one is asked for.

    Raises
    ------
    UsageError
        ``convert.overlay``: the format has no such thing, or the base is not another file in the same folder, where
        readers look for it.
    FormatError, IntegrityError, UnsupportedError
        The base cannot be read.
    """
    if options.overlay is None:
        return place
    format = place.format
    if not format.traits.overlays or place.directory:
        raise UsageError(
            f"expected one file of a format that refers to others, such as x.zt with --container 2; found a "
            f"{'folder' if place.directory else 'file'} of format {format.name}",
            rule=_RULE,
            where=place.display,
        )
    base = Location.parse(options.overlay)
    store, name = base.find()
    if not name or place.url != store.url_of(place.name) or name == place.name:
        raise UsageError(
            "expected the base as another file in the folder of the overlay, where readers look for it; copy or link "
            "it there",
            rule=_RULE,
            where=base.display,
        )
    return replace(place, format=format.overlay(store, name, place.name, options.digest))


_HEAD = "lm_head.weight"
_KEY = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class Tied:
    """What is to be done: leave out the tensors in ``without``, or say in the config that nothing is tied."""

    without: Mapping[str, Omission] = field(default_factory=dict)
    untie: bool = False
    note: str = ""


def untangle(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tied:
    """Decide for a checkpoint; reads a head and its embeddings where the config ties them."""
    inner = config.get("text_config")
    if config.get(_KEY) is not True and not (isinstance(inner, Mapping) and inner.get(_KEY) is True):
        return Tied()
    head = next((name for name in tensors if name == _HEAD or name.endswith(f".{_HEAD}")), None)
    if head is None:
        return Tied()
    embeddings = [name for name in tensors if role_of(name) == "embedding" and alike(tensors[name], tensors[head])]
    same = next((name for name in embeddings if equal_values(tensors[name], tensors[head])), None)
    if same is not None:
        reason = f"the values of {same}, to which config.json ties it: {_KEY}"
        return Tied({head: Omission(reason, superseded=True)})
    return Tied(untie=True, note=f"config.json now says {_KEY} false: {head} has values of its own")


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
