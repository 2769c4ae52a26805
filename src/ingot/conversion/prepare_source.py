"""The views that a conversion applies between opening and planning, for its options and the target's runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ingot.artifacts.attachments import ATTACHMENT_TITLES, WITH_WEIGHTS, located, require_carried
from ingot.artifacts.companions import companion_config, has_model_metadata, is_translated
from ingot.artifacts.destination import Destination
from ingot.artifacts.draft_head import check_head_or_none
from ingot.artifacts.identity import equal_values, same_type
from ingot.conversion.importance import read_importance
from ingot.conversion.onnx.graphs import transpose_for_graph, with_weight_names
from ingot.conversion.onnx.into_graph import place_in_graph
from ingot.conversion.options import ConvertOptions
from ingot.conversion.renames import renamed
from ingot.core.runtime.memory import anonymous_in_use, gc_paused, parse_size
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
from ingot.recipes.recipe import Patterns, Recipe
from ingot.stores.location import Location
from ingot.translate.companions import RULE
from ingot.translate.families import UNSUPPORTED
from ingot.translate.mlx_families import as_mlx_folder, for_mlx, is_opened
from ingot.translate.mlx_tensors import from_mlx
from ingot.translate.projectors import to_mmproj
from ingot.translate.split_tensors import experts_for_format
from ingot.translate.text_models import MMPROJ, PARTS, part_omissions, with_class_names
from ingot.translate.unsupported_families import keep_names_note
from ingot.translate.view import to_gguf, to_model
from ingot.views.attach import attach, describe, detach
from ingot.views.names import omit
from ingot.views.pruning.prune import BLOCK, PruneOptions, choose_pruning
from ingot.views.regroup import regroup, smaller_groups
from ingot.views.values import prune, weigh

DEFAULT_SHARD = 5_000_000_000
# Memory in bytes for one thread that encodes a sample of the widest dtype by the candidates of a rule.
_SAMPLE_MEMORY = 40 << 20


def with_thread_limit(options: ConvertOptions) -> ConvertOptions:
    """Return the options with so few threads that their samples fit into ``max_ram``; at least one thread."""
    if options.max_ram is None:
        return options
    available = parse_size(options.max_ram) - anonymous_in_use() - RESERVE
    return replace(options, threads=max(1, min(options.threads or default_workers(), available // _SAMPLE_MEMORY)))


def write_options(options: ConvertOptions, target: Destination) -> WriteOptions:
    """Return the options of the writer; raises ``UsageError`` ``convert.shard``."""
    shard = options.max_shard
    if shard is not None and not (target.directory and target.format.traits.shards):
        raise UsageError(
            f"expected a folder as destination and a format that shards, found format {target.format.name}",
            rule="convert.shard",
            where=target.display,
        )
    mixture = options.recipe.mixture if isinstance(options.recipe, Recipe) else None
    default_size = DEFAULT_SHARD if target.directory and not target.format.traits.shards_on_request else None
    return WriteOptions(
        digest=options.digest,
        max_shard=default_size if shard is None else parse_size(shard),
        compact=options.prune_compact,
        siblings=target.directory,
        base=target.format.base_identity(),
        file_type=None if mixture is None else mixture.file_type,
    )


_RULE = "convert.overlay"


def with_overlay_base(target: Destination, options: ConvertOptions) -> Destination:
    """Return the destination with a format that refers to the base file of the option ``overlay``.

    Without the option, the destination is returned unchanged.

    Raises
    ------
    UsageError
        ``convert.overlay``: the format cannot refer to other files, or the base is not another file in the same folder,
        where readers look for it.
    FormatError, IntegrityError, UnsupportedError
        The base cannot be read.
    """
    if options.overlay is None:
        return target
    format = target.format
    if not format.traits.overlays or target.directory:
        raise UsageError(
            f"expected one file of a format that refers to others, such as x.zt with --container 2; found a "
            f"{'folder' if target.directory else 'file'} of format {format.name}",
            rule=_RULE,
            where=target.display,
        )
    base = Location.parse(options.overlay)
    store, name = base.find()
    if not name or target.url != store.url_of(target.name) or name == target.name:
        raise UsageError(
            "expected the base as another file in the folder of the overlay, where readers look for it; copy or link "
            "it there",
            rule=_RULE,
            where=base.display,
        )
    return replace(target, format=format.overlay(store, name, target.name, options.digest))


_HEAD = "lm_head.weight"
_KEY = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class TiedHead:
    """The treatment of a tied head: tensors to omit, or a change of ``config.json`` that unties the head."""

    without: Mapping[str, Omission] = field(default_factory=dict)
    untie: bool = False
    note: str = ""


def resolve_tied_head(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TiedHead:
    """Return how to treat a stored head that ``config.json`` ties to the embeddings.

    If the head equals the embeddings, it is omitted; otherwise the config is changed. Both tensors are read only if the
    config ties them.
    """
    text_config = config.get("text_config")
    if config.get(_KEY) is not True and not (isinstance(text_config, Mapping) and text_config.get(_KEY) is True):
        return TiedHead()
    head = next((name for name in tensors if name == _HEAD or name.endswith(f".{_HEAD}")), None)
    if head is None:
        return TiedHead()
    embeddings = [name for name in tensors if role_of(name) == "embedding" and same_type(tensors[name], tensors[head])]
    same = next((name for name in embeddings if equal_values(tensors[name], tensors[head])), None)
    if same is not None:
        reason = f"the values of {same}, to which config.json ties it: {_KEY}"
        return TiedHead({head: Omission(reason, superseded=True)})
    return TiedHead(untie=True, note=f"{_KEY} is set to false in config.json: {head} differs from the embeddings")


_HINT = " (--keep-names leaves them as they are)"


def prepare_source(
    opened: Checkpoint,
    target: Destination,
    options: ConvertOptions,
    without: Mapping[str, Omission],
    planned: Collection[str] = (),
) -> View:
    """Return the view of an opened checkpoint that a conversion without quantizers writes.

    The function applies ``view_weights``, ``view_for_target`` and ``regroup``; their docstrings describe arguments and
    errors.
    """
    view = view_weights(opened, target, options, without)
    view = view.then(partial(view_for_target, target=target, options=options, planned=planned))
    return view.then(partial(regroup, groups=groups_for(view.checkpoint, target.format)))


def view_weights(
    opened: Checkpoint, target: Destination, options: ConvertOptions, without: Mapping[str, Omission]
) -> View:
    """Return the weights as quantizers read them: with the names of a model folder, pruned, without omitted tensors.

    ``without`` maps the omitted tensors to the reasons. If the target is a folder, tensors of a GGUF file get the names
    of a model folder, unless the option ``keep_names`` is set. Only known model families are translated, and only known
    families are written for MLX, because mlx_lm has code for each family.

    Pruning reads the feed-forward networks and reports to ``options.progress``. Closing the result closes ``opened``.
    If the function raises an error, ``opened`` stays open.

    Raises
    ------
    UsageError
        ``convert.prune``, ``convert.activations``, ``convert.rename``, ``attachments.none``.
    UnsupportedError
        ``convert.attachment``: the format cannot store an attachment; ``architecture.*``: the target's runtime would
        not open the result.
    """
    if attachments := _attachments(options):
        require_carried(target.format, attachments)
    remaining = omit(opened, without) if without else opened
    omitted = View(with_new_names(remaining, options))
    if options.keep_names:
        view = omitted.then(partial(_as_model, target=target, options=options))
    else:
        view = omitted.then(partial(_with_class_names, target=target))
        view = view.then(partial(with_weight_names, target=target))
        view = view.then(partial(_as_model, target=target, options=options))
        view = view.then(partial(_with_experts, target=target))
    return view.then(partial(_for_mlx, target=target, options=options)).then(partial(_pruned, options=options))


def with_new_names(checkpoint: Checkpoint, options: ConvertOptions) -> Checkpoint:
    """Return the checkpoint with the names of the option ``rename``; raise the errors of ``renamed``."""
    return renamed(checkpoint, options.rename) if options.rename else checkpoint


def view_for_target(
    checkpoint: Checkpoint, target: Destination, options: ConvertOptions, planned: Collection[str] = ()
) -> View:
    """Return weights with the names and the orientation that the target's runtime reads.

    ``checkpoint`` is the result of ``view_weights``, or a rounded view of it.

    Group sizes are not changed yet (``groups_for``). Attachments and metadata of the options are added. In GGUF,
    tensors of a model folder get llama.cpp's names, unless the option ``keep_names`` is set. Matrices of an ONNX graph
    are transposed if its operators require it. The recipe of the options determines these matrices. If there is an
    earlier plan, its tensor names ``planned`` determine them instead.

    Closing the result closes ``checkpoint``.

    Raises
    ------
    UsageError
        ``convert.importance``, ``attachments.none``, ``convert.graph``.
    UnsupportedError
        ``architecture.*``: the target's runtime would not open the result.
    FormatError
        ``draft.*``, ``attachments.coreml-package``, ``archive.*``; and the errors of opening attachments.
    """
    format = target.format
    paths = _attachments(options)
    view = View(checkpoint)
    if options.importance is not None:
        view = view.then(partial(weigh, importance=read_importance(options.importance, checkpoint)))
    attachments = view.checkpoint.attachments
    dropped = [name for name in attachments.names() if name not in format.traits.attachments]
    if dropped:
        view = view.then(partial(detach, kinds=dropped))
        attachments = view.checkpoint.attachments
    if attachments.draft is not None and "draft" not in paths:
        with located("draft head"):
            check_head_or_none(attachments.draft)
    graph = paths.pop("graph", None)
    if paths:
        view = view.then(partial(attach, **paths))
    if options.metadata:
        view = view.then(partial(describe, metadata=options.metadata))
    if graph is not None:
        view = view.then(partial(place_in_graph, path=graph))
    recipe = options.recipe if isinstance(options.recipe, Recipe) else None
    if view.checkpoint.attachments.graph is not None:
        requantize = options.allow_requantize
        transposed = partial(transpose_for_graph, target=target, recipe=recipe, planned=planned, requantize=requantize)
        view = view.then(transposed)
    view = view.then(partial(_as_gguf, target=target, options=options))
    view = view.then(partial(_as_mlx, target=target, options=options))
    noted = [name for name in dropped if name not in WITH_WEIGHTS]
    return view.with_notes(*(f"{format.name} holds weights alone, not the {ATTACHMENT_TITLES[name]}" for name in noted))


def omitted_parts(opened: Checkpoint, target: Destination, options: ConvertOptions) -> dict[str, Omission]:
    """Return the omissions of the tensors outside of the part of the options; none without the option ``part``.

    Raises ``UsageError`` ``architecture.part``: an unknown part, or a target other than GGUF.
    """
    if options.part is None:
        return {}
    if options.part not in PARTS:
        raise UsageError(f"expected part {' or '.join(PARTS)}, found {options.part!r:.40}", rule="architecture.part")
    if not has_model_metadata(target.format.name):
        raise UsageError(
            f"parts are files of llama.cpp: expected a target such as model.gguf, found format {target.format.name}",
            rule="architecture.part",
            where=target.display,
        )
    return part_omissions(opened, options.part)


def accepted_defects(options: ConvertOptions) -> Callable[[str], bool]:
    """Return a function that states whether a conversion accepts that the source lacks the tensor of a given name.

    Tensors that the option ``drop`` matches may be missing. For the part ``mmproj``, any tensor may be missing: no text
    model is needed, and ``translate.projectors`` checks the vision model.
    """
    return (lambda _: True) if options.part == MMPROJ else Patterns(tuple(options.drop))


def groups_for(checkpoint: Checkpoint, format: Format, *, one_group: bool = False) -> Mapping[str, int]:
    """Return the new group size, in columns, of each tensor whose groups must become smaller for a format.

    If the format requires it, all these tensors get the same group size. ``one_group`` is true if a preset has rounded
    the matrices; then all get the same size also if the format only prefers it.
    """
    sizes = format.traits.group_sizes
    uniform = format.traits.one_group or (one_group and format.traits.one_group_preferred)
    return {} if sizes is None else smaller_groups(checkpoint, sizes, common_size=uniform)


def _attachments(options: ConvertOptions) -> dict[str, Any]:
    """Return the paths of the attachments that the options request, keyed by the name of the attachment."""
    return {name: path for name in ATTACHMENT_TITLES if (path := getattr(options, name, None)) is not None}


def _as_model(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return a GGUF file's checkpoint with the names and files of a model folder, if the target needs them."""
    names = target.directory or options.graph is not None
    if not has_model_metadata(view.format) or has_model_metadata(target.format.name) or not names:
        return View(view)
    if options.keep_names:
        return View(view, [keep_names_note(target.format.name)] if target.directory else [])
    try:
        return to_model(view, no_tokenizer=options.no_tokenizer, hint=_HINT)
    except UnsupportedError as error:
        if target.directory or error.rule != UNSUPPORTED:
            raise
        return View(view)  # into a graph, tensors are placed by name, and unknown names raise an error later


def _with_experts(view: Checkpoint, target: Destination) -> View:
    """Return the checkpoint with experts stored as the target's runtimes expect; with llama.cpp's names, unchanged."""
    if _has_gguf_names(view) or not (target.directory or has_model_metadata(target.format.name)):
        return View(view)
    result = View(view)
    if target.format.name != MlxFormat.name:
        result = result.then(partial(from_mlx, config=companion_config(view.companions, RULE)))
    return result.then(lambda model: experts_for_format(model, target.format.name, hint=_HINT))


def _with_class_names(view: Checkpoint, target: Destination) -> View:
    """Return a model folder's checkpoint with the names of its transformers class, if the target is a model."""
    if _has_gguf_names(view) or not (target.directory or has_model_metadata(target.format.name)):
        return View(view)
    return with_class_names(view, companion_config(view.companions, RULE))


def _has_gguf_names(view: Checkpoint) -> bool:
    return "general.architecture" in view.metadata


def _for_mlx(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return the checkpoint without tensors that mlx_lm refuses; the checkpoint itself for other formats."""
    if target.format.name != MlxFormat.name or not target.directory:
        return View(view)
    config = companion_config(view.companions, RULE)
    if not options.keep_names:
        return View(for_mlx(view, config))
    return View(view, [] if is_opened(config) else [keep_names_note(MlxFormat.name)])


def _as_mlx(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return the checkpoint with the tensors of mlx_lm's module; the checkpoint itself for other formats."""
    if target.format.name != MlxFormat.name or not target.directory or options.keep_names:
        return View(view)
    return as_mlx_folder(view, companion_config(view.companions, RULE), no_tokenizer=options.no_tokenizer)


def _as_gguf(view: Checkpoint, target: Destination, options: ConvertOptions) -> View:
    """Return the checkpoint of a model folder translated for llama.cpp; the checkpoint itself for other formats."""
    if not has_model_metadata(target.format.name) or is_translated(view):
        return View(view)
    if options.keep_names:
        return View(view, [keep_names_note(target.format.name)])
    if options.part == MMPROJ:
        return to_mmproj(view)
    with gc_paused():  # a tokenizer has many small objects, and none of them is garbage
        return to_gguf(view, no_tokenizer=options.no_tokenizer, hint=_HINT)


def _pruned(view: Checkpoint, options: ConvertOptions) -> View:
    if options.prune is None:
        if options.prune_block is not None or options.activations is not None:
            raise UsageError("--prune-block and --activations need --prune with a share", rule="convert.prune")
        return View(view)
    block = BLOCK if options.prune_block is None else options.prune_block
    prune_options = PruneOptions(options.prune, block, None, options.threads)
    plan = choose_pruning(view, prune_options, options.activations, options.progress)
    return View(prune(view, plan.tensors), plan.notes, plan.read)
