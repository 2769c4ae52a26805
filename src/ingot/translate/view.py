"""Views that convert a model folder for llama.cpp, and a GGUF file for transformers (``spec/architectures.md``).

Rows are reordered and experts stacked without decoding; only small vectors are computed, in f32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.gguf.metadata import ABOUT, to_gguf_metadata, with_values
from ingot.model.account import Omission, list_names
from ingot.model.checkpoint import Attributes, Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import View, derive_checkpoint
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.stores.temporary import TemporaryFolder
from ingot.translate import companions, foreign_metadata, hyper, keys, layer_scalars, next_token, pooling, rotary
from ingot.translate.companions import PREFIX, TOKENIZER_KEY
from ingot.translate.expected import absent_tensors
from ingot.translate.families import FAMILIES, UNSUPPORTED, Family, family_of, has_classifier
from ingot.translate.fused_experts import split_fused_experts
from ingot.translate.split_tensors import join_tensors, packed_latent, split_tensors
from ingot.translate.steps import apply_steps, computed_names, undo_steps
from ingot.translate.tensor_plan import (
    CLASSES,
    EMBEDDING,
    HEAD,
    POSITIONS,
    SCALE_NAMES,
    TensorPlan,
    apply_to_gguf,
    apply_to_model,
    plan_to_gguf,
    plan_to_model,
)
from ingot.translate.text_models import as_plain, outer_metadata, with_text_config, with_usual_names
from ingot.translate.unsupported_families import missing_config, require_family, unknown_architecture
from ingot.views.dense import Change, add, change
from ingot.views.nvfp4_scales import join_second_scales, rounded_second_scales, split_second_scales
from ingot.views.rows import take

_FLOATS = ("f32", "f16", "bf16")
_ROWS = "architecture.rows"


def to_gguf(checkpoint: Checkpoint, *, no_tokenizer: bool = False, hint: str = "") -> View:
    """Return a model folder's checkpoint with llama.cpp's tensors and metadata.

    Tensors without a name in llama.cpp are omissions of the view: superseded or dropped.

    Parameters
    ----------
    checkpoint : Checkpoint
    no_tokenizer : bool
        Whether a file without a tokenizer is accepted, if the folder has none that GGUF can hold.
    hint : str
        Appended to the first note, which counts the tensors with new names.

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.unknown``, ``architecture.config``, ``architecture.rows``, ``architecture.tokenizer``,
        ``architecture.tokens``, ``architecture.pooling``, ``architecture.names``.
    FormatError
        ``architecture.companion``: ``config.json`` is no JSON object.
    """
    files = companions.read_files(checkpoint.companions)
    outer = companions.parse_file(files, CONFIG)
    files, config, text_notes = with_text_config(files, outer)
    family = require_family(config if CONFIG in files else None, checkpoint.location)
    config = hyper.usual_keys(config, family)
    named = with_usual_names(checkpoint, family)
    original = checkpoint = next_token.with_layers(named.checkpoint, config, family)
    packed = packed_latent(checkpoint) if family.latent else []
    can_split = not packed
    checkpoint = apply_steps(split_second_scales(checkpoint), config, family)
    checkpoint = split_fused_experts(checkpoint, config, family)
    checkpoint = split_tensors(checkpoint, config, family, parted=can_split)
    plan = plan_to_gguf(checkpoint, config, family)
    rows, notes = _require_rows(checkpoint, plan, config)
    typed, dropped = hyper.to_metadata(config, family, list(original), parted=can_split)
    if packed:
        notes.append(
            f"{packed[0]} ({len(packed)} tensors) is packed and stays one matrix, attn_kv_b: llama.cpp caches full "
            "keys and values, not the latent vector; --recipe decompress decodes it, so that it is split"
        )
    if rows:
        typed[f"{family.arch}.vocab_size"] = ("u32", rows)
    for key, module in family.rows.items():
        typed |= {
            f"{family.arch}.{key}": ("u32", checkpoint[name].shape[0])
            for name in checkpoint
            if name.endswith(f".{module}.weight") and len(checkpoint[name].shape) == 2
        }
    typed |= layer_scalars.to_metadata(checkpoint, family)
    typed |= outer_metadata(outer, family)
    typed |= next_token.to_metadata(next_token.count_layers(checkpoint, config, family), config, family)
    tokenizer_metadata, tokenizer_notes = _tokenizer_metadata(files, rows, no_tokenizer=no_tokenizer)
    pooled = pooling.Pooling(files)
    labels = pooling.labels_of(config, _classes(checkpoint, plan)) if has_classifier(family, original) else None
    pooling_metadata, pooling_notes = pooling.to_metadata(pooled, family, labels)
    companion_metadata, companion_notes = companions.to_metadata(files, tokenizer_metadata)
    notes += [*tokenizer_notes, *pooling_notes, *companion_notes]
    original_metadata = {key: value for key, value in checkpoint.metadata.items() if key not in ("format", ABOUT)}
    converted = {**typed, **tokenizer_metadata, **pooling_metadata, **companion_metadata}
    foreign = foreign_metadata.read(checkpoint.companions)
    metadata = with_values(to_gguf_metadata({**foreign, **original_metadata}), converted)
    view = apply_to_gguf(checkpoint, plan)
    if family.padded and POSITIONS in view:
        view, before = _drop_padding_positions(view, config)
        dropped.append(f"the first {before} rows of {POSITIONS}, which belong to padding")
    if factors := {} if family.rope is None else rotary.tensors(config, family):
        view = add(view, factors)
    changes = _widening_changes(view, family)
    inverted = rounded_second_scales(original)
    wide = [name for name in computed_names(original, family) if original[name].dtype == "f32"]
    dropped += _describe_rounding(view, changes, inverted, wide)
    view = change(view, changes)
    view = relabel(view, {"metadata": metadata, "companions": None}, unread={**view.unread, **pooled.missing})
    renamed = plan.describe(f"llama.cpp's architecture {family.arch}") + hint
    return View(
        view, [*named.notes, *text_notes, renamed, *_dropped_note(dropped), *notes], inexact=_new_names(plan, inverted)
    )


def _describe_rounding(
    view: Checkpoint, changes: Mapping[str, Change], inverted: Sequence[str], computed: Sequence[str]
) -> Iterator[str]:
    """Yield notes on values that the view rounds: norms plus 1, and reciprocals of NVFP4 scales."""
    rounded = [name for name, planned in changes.items() if planned.plus and not _is_reversible(view[name], planned)]
    if rounded:
        yield f"the last bits of {', '.join(rounded[:3])}, where 1 + w is rounded"
    if computed:
        yield f"the last bits of {', '.join(computed[:3])}, which llama.cpp stores as a function of them"
    if inverted:
        yield (
            f"the last bits in f32 of {', '.join(inverted[:3])} ({len(inverted)} tensors): scales were divisors and "
            "are multiplied as reciprocals here; the values are equal in their stored type"
        )


def _tokenizer_metadata(files: Mapping[str, str], rows: int, *, no_tokenizer: bool) -> tuple[keys.Typed, list[str]]:
    """Return GGUF metadata of the tokenizer, and notes.

    If ``no_tokenizer`` is true and the tokenizer cannot be converted, the metadata describe a file without one.

    Raises the errors of ``companions.tokenizer_metadata``.
    """
    try:
        return companions.tokenizer_metadata(files, rows)
    except UnsupportedError as error:
        if not no_tokenizer:
            raise
        message = f"no tokenizer, as --no-tokenizer accepts: {error.message.partition(';')[0]}"
        return companions.metadata_without_tokenizer(files, rows), [message]


def _require_rows(checkpoint: Checkpoint, plan: TensorPlan, config: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the number of rows of the embedding, and notes about ``vocab_size``.

    The number is 0 if the model has no embedding. If ``config.json`` declares another ``vocab_size``, there is one
    note. Raises ``UnsupportedError`` ``architecture.rows`` if the head has another number of rows.
    """
    shapes = {new: checkpoint[old].shape for old, new in plan.names.items() if new in (EMBEDDING, HEAD)}
    rows = next(iter(shapes.get(EMBEDDING, ())), 0)
    head = next(iter(shapes.get(HEAD, ())), rows)
    if rows and head != rows:
        raise UnsupportedError(
            f"the head has {head} rows, but the embedding {rows}; --keep-names leaves them",
            rule=_ROWS,
            where=plan.old_name(HEAD),
        )
    declared = config.get("vocab_size")
    if rows and declared is not None and declared != rows:
        return rows, [f"config.json states vocab_size {declared!r:.40}; the embedding's {rows} rows are used instead"]
    return rows, []


def _classes(checkpoint: Checkpoint, plan: TensorPlan) -> int:
    """Return the number of outputs of a classifier; 0 if there is none."""
    old = plan.old_name(CLASSES)
    return checkpoint[old].shape[0] if old is not None and checkpoint[old].shape else 0


def _new_names(plan: TensorPlan, names: Collection[str]) -> frozenset[str]:
    """Return the new names of tensors, or of the stacks that contain them."""
    stacks = (new for new, members in plan.stacks.items() if not set(names).isdisjoint(members))
    return frozenset((*stacks, *(plan.names[name] for name in names if name in plan.names)))


def _drop_padding_positions(view: Checkpoint, config: Mapping[str, Any]) -> tuple[Checkpoint, int]:
    """Return the view without the position embeddings that no token uses, and their number.

    Raises ``UnsupportedError`` ``architecture.rows``: no position would remain.
    """
    before = hyper.positions_before_tokens(config)
    shape = view[POSITIONS].shape
    if len(shape) != 2 or shape[0] <= before:
        raise UnsupportedError(
            f"expected more than {before} rows of positions, found shape {list(shape)}; --keep-names leaves them",
            rule=_ROWS,
            where=POSITIONS,
        )
    return take(view, {POSITIONS: slice(before, None)}), before


def to_model(checkpoint: Checkpoint, *, no_tokenizer: bool = False, hint: str = "") -> View:
    """Return a GGUF file's checkpoint with transformers' tensors, and the files of its folder.

    Tensors without a name in transformers are omissions of the view: superseded or dropped.

    Parameters
    ----------
    checkpoint : Checkpoint
    no_tokenizer : bool
        Whether a folder without a tokenizer is accepted, if ``tokenizer.json`` cannot hold the file's tokenizer.
    hint : str
        Appended to the first note, which counts the tensors with new names.

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.unknown``, ``architecture.config``, ``architecture.rows``, ``architecture.tokenizer``.
    """
    metadata = checkpoint.metadata
    arch = str(metadata.get("general.architecture"))
    family, original = _family(metadata, arch)
    if family is None:
        raise unknown_architecture(metadata, checkpoint.location)
    if not family.from_metadata and not original:
        raise missing_config(family, checkpoint.location)
    has_head = original.get("architectures") not in (None, [family.model_class]) or CLASSES in checkpoint
    plan = plan_to_model(checkpoint, metadata, family, base=family.base if has_head else "")
    omitted = {name: checkpoint[name] for name in plan.omissions}
    view = join_second_scales(apply_to_model(checkpoint, plan))
    changes = _narrowing_changes(view, family, plan)
    position = plan.names.get(POSITIONS)
    if family.padded and position is not None and len(view[position].shape) == 2:
        rows = hyper.positions_before_tokens(
            original or {"pad_token_id": metadata.get("tokenizer.ggml.padding_token_id")}
        )
        changes[position] = replace(changes.get(position, Change(view[position].dtype)), zero_rows=rows)
    view = change(view, changes)
    factors = {
        name: tensor.numpy("f32")
        for name, tensor in omitted.items()
        if name in rotary.TENSORS and tensor.size <= rotary.MAX_FACTORS and _is_small(name, tensor)
    }
    view = layer_scalars.add_tensors(view, metadata, family, _main_dtype(view))
    config = next_token.to_config(metadata, family, hyper.to_config(metadata, family, list(view), factors))
    if family.steps:
        view = undo_steps(view, {**hyper.usual_keys(original, family), **config}, family)
        view = change(view, _narrowing_computed(view, family))
    config = hyper.family_keys(config, family, original)
    changed = list[str]()
    dtype_key = "torch_dtype" if "torch_dtype" in original and "dtype" not in original else "dtype"
    config[dtype_key] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(_main_dtype(view), "float32")
    if original:
        config, changed = hyper.merge_configs(original, _without_token_ids(config, metadata), family)
    view = next_token.without_layers(view, config, family)
    config, notes = as_plain(config, family)
    view = join_tensors(view, hyper.usual_keys(config, family), family)
    absent = [] if original else absent_tensors(config, family, view)
    if absent:
        raise UnsupportedError(
            f"the file lacks {list_names(absent)}, which a model of the family {family.model_type} has; convert the "
            "folder that it was made from, or pass --keep-names",
            rule=UNSUPPORTED,
            where=checkpoint.location,
        )
    if changed:
        notes.append(
            f"the GGUF metadata differ from the config.json that the file contains; "
            f"they are used for {', '.join(changed)}"
        )
    files, dropped = _files(metadata, config, family, no_tokenizer=no_tokenizer)
    omissions = view.omissions
    if not original and not rotary.states_tensors(config):
        omission = Omission("config.json has no key for this scaling of the rotary embedding")
        scaled = [
            name for name in rotary.TENSORS if name in omitted and not np.all(factors.get(name, 0) == np.float32(1))
        ]
        stored = [origin for name in scaled for origin in checkpoint.origins_of(name)]
        omissions = {**omissions, **dict.fromkeys(stored, omission)}
    unread_files, unread_notes, unread_dropped = _keep_unread(metadata, family)
    files |= unread_files
    renamed = plan.describe(f"transformers' {family.model_class}") + hint
    view = relabel(view, {"metadata": {"format": "pt"}, "companions": files}, omissions=omissions)
    return View(view, [renamed, *notes, *unread_notes, *_dropped_note([*dropped, *unread_dropped])])


def _keep_unread(metadata: Mapping[str, Any], family: Family) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Return a file with metadata that no other file of the folder contains, notes, and the names of dropped
    metadata.
    """
    unread = [*_unread_keys(metadata, family)]
    files = foreign_metadata.to_files(metadata, unread)
    names = f"metadata {', '.join(unread[:6])}" + (f" and {len(unread) - 6} more" if len(unread) > 6 else "")
    if files:
        return files, [f"{names}: kept in {foreign_metadata.FILE}, from which a conversion to GGUF restores them"], []
    return {}, [], [names] if unread else []


def _files(
    metadata: Mapping[str, Any], config: Mapping[str, Any], family: Family, *, no_tokenizer: bool
) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of the folder, and notes on texts that they tokenize differently from the GGUF file.

    If ``no_tokenizer`` is true and the tokenizer cannot be converted, it is left out, with a note.

    Raises ``UnsupportedError`` ``architecture.tokenizer``.
    """
    try:
        return companions.files_of(metadata, config, family)
    except UnsupportedError as error:
        if not no_tokenizer:
            raise
        without = {key: value for key, value in metadata.items() if key != keys.MODEL}
        files, _ = companions.files_of(without, config, family)
        return files, [f"the tokenizer, as --no-tokenizer accepts: {error.message.partition(';')[0]}"]


def _without_token_ids(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without ids of special tokens that are equal in the tokenizer files and in the metadata."""
    ids = companions.special_ids(metadata, companions.stored_files(metadata))
    return {key: value for key, value in config.items() if ids.get(key.removesuffix("_token_id")) != value}


def _family(metadata: Mapping[str, Any], arch: str) -> tuple[Family | None, dict[str, Any]]:
    """Return the family of a GGUF file, and the original ``config.json`` that the file contains.

    The config is empty if the file does not contain it, or if it belongs to another architecture.
    """
    stored = companions.stored_files(metadata)
    try:
        original = companions.parse_file(stored, CONFIG)
    except FormatError:
        original = {}
    family = FAMILIES.get(str(original.get("model_type")))
    if family is not None and family.arch == arch:
        return family, original
    return family_of(arch, metadata), {}


def _widening_changes(view: Checkpoint, family: Family) -> dict[str, Change]:
    """Return the changes of small tensors that llama.cpp requires in f32, by name (``GgufFormat.required_dtype``).

    The changes are casts to f32, the addition of 1 to norms, and the removal of a dimension of 1 from shared experts'
    gates.
    """
    changes = {}
    for name, tensor in view.items():
        plus = 1.0 if family.shifted and name.endswith("norm.weight") else 0.0
        vector = name.endswith("ffn_gate_inp_shexp.weight") and tensor.shape[:1] == (1,)
        if not _is_small(name, tensor) or (tensor.dtype == "f32" and not plus and not vector):
            continue
        changes[name] = Change("f32", plus, tensor.shape[1:] if vector else None)
    return changes


def _narrowing_changes(view: Checkpoint, family: Family, plan: TensorPlan) -> dict[str, Change]:
    """Return the casts of small f32 tensors to the main dtype, by name, if they are exact."""
    main = _main_dtype(view)
    before = {new: old for old, new in plan.names.items()}
    changes = {}
    for name, tensor in view.items():
        old = before.get(name, name)
        if not _is_small(old, tensor) or tensor.dtype != "f32" or old.endswith(SCALE_NAMES):
            continue
        shape = (1, *tensor.shape) if old.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1 else None
        plus = -1.0 if family.shifted and old.endswith("norm.weight") else 0.0
        values = Change("f32", plus).values(tensor)
        with np.errstate(over="ignore", invalid="ignore"):
            fits = main in ("f16", "bf16") and np.array_equal(cast(cast(values, main), "f32"), values)
        if fits or plus or shape is not None:
            changes[name] = Change(main if fits else "f32", plus, shape)
    return changes


def _narrowing_computed(view: Checkpoint, family: Family) -> dict[str, Change]:
    """Return the casts of tensors that a step computed in f32 to the main dtype, if they are exact."""
    main = _main_dtype(view)
    changes = {}
    for name in computed_names(view, family) if main in ("f16", "bf16") else ():
        values = view[name].numpy("f32")
        with np.errstate(over="ignore", invalid="ignore"):
            if np.array_equal(cast(cast(values, main), "f32"), values):
                changes[name] = Change(main)
    return changes


def _is_reversible(tensor: Tensor, planned: Change) -> bool:
    """Return whether a change that adds a number to a tensor can be undone exactly by subtracting the number."""
    return bool(np.array_equal(planned.values(tensor) - np.float32(planned.plus), tensor.numpy("f32")))


def _is_small(name: str, tensor: Tensor) -> bool:
    """Return whether llama.cpp stores a tensor in f32, by its name in llama.cpp."""
    small = GgufFormat().required_dtype(name, tensor.shape) is not None
    return small and tensor.codec == DenseLayout.codec and tensor.dtype in _FLOATS


def _main_dtype(view: Checkpoint) -> str:
    sizes: Counter[str] = Counter()
    for tensor in view.values():
        if tensor.codec == DenseLayout.codec and tensor.dtype in _FLOATS and len(tensor.shape) > 1:
            sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "f32"


def relabel(checkpoint: Checkpoint, label: Mapping[str, Any], **changes: Unpack[Attributes]) -> Checkpoint:
    """Return the checkpoint with other metadata, companion files and attributes.

    The key ``metadata`` of ``label`` contains the new metadata. The key ``companions`` contains the texts of files that
    are added or replaced, by file name; None adds no file. ``changes`` are new values of other attributes.
    """
    with ExitStack() as stack:
        folder = None if label["companions"] is None else TemporaryFolder(label["companions"])
        if folder is not None:
            stack.callback(folder.close)
        description = {"metadata": sorted(label["metadata"]), "companions": sorted(label["companions"] or ())}
        tensors = LazyMap(checkpoint, checkpoint.__getitem__)
        changes["metadata"] = label["metadata"]
        changes["companions"] = {**checkpoint.companions, **(folder.paths if folder is not None else {})}
        return derive_checkpoint(
            checkpoint, tensors, relabel, dict(label), description, also_close=stack.pop_all().close, **changes
        )


def _unread_keys(metadata: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield metadata keys that no file of the folder contains, except for zeros without effect."""
    about = {f"general.{name}" for name in ("architecture", "type", "alignment", "file_type", "quantization_version")}
    read = {ABOUT, TOKENIZER_KEY, f"{family.arch}.{next_token.KEY}", *about, *hyper.read_keys(family), *keys.READ}
    stored = companions.stored_files(metadata)
    ids = companions.special_ids(metadata, stored) if stored else {}
    roles = {keys.ID.format(name): role for role, name in keys.IDS.items()}
    implied = {key for key, role in roles.items() if role in ids and ids[role] == metadata.get(key)}
    if stored and not any(name in stored for name in companions.SENTENCEPIECE_FILES):
        read -= {key for key, role in roles.items() if role not in ids}
    for key, value in metadata.items():
        is_known = key in read or key in implied or key.startswith((PREFIX, f"{keys.TEMPLATE}."))
        if not is_known and not (value == 0 and key.startswith(f"{family.arch}.")):
            yield key


def _dropped_note(phrases: Sequence[str]) -> list[str]:
    return [f"not carried over: {'; '.join(phrases)}"] if phrases else []
