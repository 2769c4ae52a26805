"""Views of a model folder as llama.cpp has it, and of a GGUF file as transformers has it (``spec/architectures.md``).

Rows are put in order and experts stacked in the packed form; only small vectors are computed, in f32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from ingot.artifacts.companions import has_model_metadata
from ingot.core.numeric.dtypes import cast
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.gguf.metadata import ABOUT, to_gguf_metadata, with_values
from ingot.model.account import Omission
from ingot.model.checkpoint import Attributes, Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import View, derive_checkpoint
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.stores.temporary import TemporaryFolder
from ingot.translate import companions, hyper, keys, pooling, rotary
from ingot.translate.apart import apart, has_parted, together
from ingot.translate.companions import PREFIX, WHOLE
from ingot.translate.families import FAMILIES, Family, classifies, family_of
from ingot.translate.tensor_plan import (
    CLASSES,
    EMBEDDING,
    HEAD,
    POSITIONS,
    SCALE_NAMES,
    TensorPlan,
    plan_to_gguf,
    plan_to_model,
    stacked,
    unstacked,
)
from ingot.translate.unknown import require_family, unknown_architecture
from ingot.views.dense import Change, add, change
from ingot.views.rows import take
from ingot.views.second import join_seconds, part_seconds, rounded_seconds

_FLOATS = ("f32", "f16", "bf16")
_ROWS = "architecture.rows"


def is_translated(checkpoint: Checkpoint) -> bool:
    """Return whether tensors have llama.cpp's names already: of a GGUF file, or of a container made of one."""
    return has_model_metadata(checkpoint.format) or isinstance(checkpoint.metadata.get("general.architecture"), str)


def to_gguf(checkpoint: Checkpoint, *, no_tokenizer: bool = False, hint: str = "") -> View:
    """Return a model folder's checkpoint as llama.cpp has it.

    Tensors without a name there are omissions of the view: superseded or lost.

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
        ``architecture.tokens``, ``architecture.pooling``.
    FormatError
        ``architecture.companion``: ``config.json`` is no JSON object.
    """
    files = companions.read_files(checkpoint.companions)
    config = companions.parsed(files, CONFIG)
    family = require_family(config if CONFIG in files else None, checkpoint.location)
    own = checkpoint
    parted = has_parted(checkpoint)
    checkpoint = apart(part_seconds(checkpoint), config, family, parted=parted)
    plan = plan_to_gguf(checkpoint, config, family)
    rows, notes = _require_rows(checkpoint, plan, config)
    typed, lost = hyper.to_metadata(config, family, list(own), parted=parted)
    if rows:
        typed[f"{family.arch}.vocab_size"] = ("u32", rows)
    words, more = _words(files, rows, no_tokenizer=no_tokenizer)
    pooled = pooling.Pooling(files)
    labels = pooling.labels_of(config, _classes(checkpoint, plan)) if classifies(family, own) else None
    pools, told = pooling.to_metadata(pooled, family, labels)
    notes += [*more, *told]
    kept = {key: value for key, value in checkpoint.metadata.items() if key not in ("format", ABOUT)}
    metadata = with_values(to_gguf_metadata(kept), {**typed, **words, **pools, **companions.to_metadata(files)})
    view = stacked(checkpoint, plan)
    if family.padded and POSITIONS in view:
        view, before = _behind_padding(view, config)
        lost.append(f"the first {before} rows of {POSITIONS}, those of padding")
    if factors := {} if family.rope is None else rotary.tensors(config, family):
        view = add(view, factors)
    changes = _widened(view, family)
    inverted = rounded_seconds(own)
    lost += _rounded(view, changes, inverted)
    view = change(view, changes)
    view = _labelled(view, {"metadata": metadata, "companions": None}, unread={**view.unread, **pooled.missing})
    renamed = plan.describe(f"llama.cpp's architecture {family.arch}") + hint
    return View(view, [renamed, *_lost(lost), *notes], inexact=_named(plan, inverted))


def _rounded(view: Checkpoint, changes: Mapping[str, Change], inverted: Sequence[str]) -> Iterator[str]:
    """Yield what is rounded on the way: norms that get 1 added, and scales of NVFP4 that become reciprocals."""
    rounded = [name for name, wanted in changes.items() if wanted.plus and not _comes_back(view[name], wanted)]
    if rounded:
        yield f"the last bits of {', '.join(rounded[:3])}, of which 1 + w is rounded"
    if inverted:
        yield (
            f"the last bits in f32 of {', '.join(inverted[:3])} ({len(inverted)} tensors): scales were divided by "
            "a number and are multiplied by its reciprocal here: values are equal in their own type"
        )


def _words(files: Mapping[str, str], rows: int, *, no_tokenizer: bool) -> tuple[keys.Typed, list[str]]:
    """Return GGUF metadata of the tokenizer and notes.

    Raises as ``companions.tokenizer_metadata``, unless a file without a tokenizer is accepted.
    """
    try:
        return companions.tokenizer_metadata(files, rows)
    except UnsupportedError as error:
        if not no_tokenizer:
            raise
        message = f"no tokenizer, as --no-tokenizer accepts: {error.message.partition(';')[0]}"
        return companions.without_words(files, rows), [message]


def _require_rows(checkpoint: Checkpoint, plan: TensorPlan, config: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the rows of the embedding, 0 if there is none, and a note if ``config.json`` states others.

    Raises ``UnsupportedError`` ``architecture.rows`` if the head has other rows.
    """
    shapes = {new: checkpoint[old].shape for old, new in plan.names.items() if new in (EMBEDDING, HEAD)}
    rows = next(iter(shapes.get(EMBEDDING, ())), 0)
    head = next(iter(shapes.get(HEAD, ())), rows)
    if rows and head != rows:
        raise UnsupportedError(
            f"expected as many rows of the head as of the embedding, found {head} and {rows}; --keep-names leaves them",
            rule=_ROWS,
            where=plan.old_name(HEAD),
        )
    stated = config.get("vocab_size")
    if rows and stated is not None and stated != rows:
        return rows, [f"config.json states vocab_size {stated!r:.40}; the {rows} rows of the embedding count"]
    return rows, []


def _classes(checkpoint: Checkpoint, plan: TensorPlan) -> int:
    """Return the outputs of a classifier."""
    old = plan.old_name(CLASSES)
    return checkpoint[old].shape[0] if old is not None and checkpoint[old].shape else 0


def _named(plan: TensorPlan, names: Collection[str]) -> frozenset[str]:
    """Return the new names of tensors, of each or of the stack it is in."""
    stacks = (new for new, members in plan.stacks.items() if not set(names).isdisjoint(members))
    return frozenset((*stacks, *(plan.names[name] for name in names if name in plan.names)))


def _behind_padding(view: Checkpoint, config: Mapping[str, Any]) -> tuple[Checkpoint, int]:
    """Return the view less the positions that no token has, and their number; refused where there are no others."""
    before = hyper.positions_before(config)
    shape = view[POSITIONS].shape
    if len(shape) != 2 or shape[0] <= before:
        raise UnsupportedError(
            f"expected more than {before} rows of positions, found shape {list(shape)}; --keep-names leaves them",
            rule=_ROWS,
            where=POSITIONS,
        )
    return take(view, {POSITIONS: slice(before, None)}), before


def to_model(checkpoint: Checkpoint, *, no_tokenizer: bool = False, hint: str = "") -> View:
    """Return a GGUF file's checkpoint as transformers has it, with the files of its folder.

    Tensors without a name there are omissions of the view: superseded or lost.

    Parameters
    ----------
    checkpoint : Checkpoint
    no_tokenizer : bool
        Whether a folder without a tokenizer is accepted, if ``tokenizer.json`` cannot hold that of the file.
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
    family, stated = _family(metadata, arch)
    if family is None:
        raise unknown_architecture(metadata, checkpoint.location)
    heads = stated.get("architectures") not in (None, [family.model_class]) or CLASSES in checkpoint
    plan = plan_to_model(checkpoint, metadata, family, base=family.base if heads else "")
    notes = list[str]()
    omitted = {name: checkpoint[name] for name in plan.omissions}
    view = join_seconds(unstacked(checkpoint, plan))
    changes = _narrowed(view, family, plan)
    position = plan.names.get(POSITIONS)
    if family.padded and position is not None and len(view[position].shape) == 2:
        rows = hyper.positions_before(stated or {"pad_token_id": metadata.get("tokenizer.ggml.padding_token_id")})
        changes[position] = replace(changes.get(position, Change(view[position].dtype)), above=rows)
    view = change(view, changes)
    factors = {
        name: tensor.numpy("f32")
        for name, tensor in omitted.items()
        if name in rotary.TENSORS and tensor.size <= rotary.MOST_FACTORS and _is_small(name, tensor)
    }
    config = hyper.to_config(metadata, family, list(view), factors)
    changed = list[str]()
    dtype_key = "torch_dtype" if "torch_dtype" in stated and "dtype" not in stated else "dtype"
    config[dtype_key] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(_main_type(view), "float32")
    if stated:
        config, changed = hyper.merged(stated, _without_named(config, metadata), family)
    view = together(view, config, family)
    if changed:
        notes.append(
            f"the GGUF metadata differ from the config.json that the file keeps; they count for {', '.join(changed)}"
        )
    files, lost = _files(metadata, config, family, no_tokenizer=no_tokenizer)
    omissions = view.omissions
    if not stated and "long_factor" not in rotary.rope_of(config):
        unstated = Omission("config.json has no key for this scaling of the rotary embedding")
        stored = [origin for name in rotary.TENSORS if name in omitted for origin in checkpoint.origins_of(name)]
        omissions = {**omissions, **dict.fromkeys(stored, unstated)}
    unread = [*_unread(metadata, family)]
    if unread:
        lost.append(f"metadata {', '.join(unread[:6])}" + (f" and {len(unread) - 6} more" if len(unread) > 6 else ""))
    renamed = plan.describe(f"transformers' {family.model_class}") + hint
    view = _labelled(view, {"metadata": {"format": "pt"}, "companions": files}, omissions=omissions)
    return View(view, [renamed, *notes, *_lost(lost)])


def _files(
    metadata: Mapping[str, Any], config: Mapping[str, Any], family: Family, *, no_tokenizer: bool
) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of the folder, and what they do otherwise; errors as ``to_model``."""
    try:
        return companions.files_of(metadata, config, family)
    except UnsupportedError as error:
        if not no_tokenizer:
            raise
        without = {key: value for key, value in metadata.items() if key != keys.MODEL}
        files, _ = companions.files_of(without, config, family)
        return files, [f"the tokenizer, as --no-tokenizer accepts: {error.message.partition(';')[0]}"]


def _without_named(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the ids of special tokens that the kept files of the tokenizer name as metadata do."""
    ids = companions.special_ids(metadata, companions.kept(metadata))
    return {key: value for key, value in config.items() if ids.get(key.removesuffix("_token_id")) != value}


def _family(metadata: Mapping[str, Any], arch: str) -> tuple[Family | None, dict[str, Any]]:
    """Return what a file is taken for, and the ``config.json`` that it was made with, where it is of that kind."""
    kept = companions.kept(metadata)
    try:
        stated = companions.parsed(kept, CONFIG)
    except FormatError:
        stated = {}
    own = FAMILIES.get(str(stated.get("model_type")))
    if own is not None and own.arch == arch:
        return own, stated
    return family_of(arch, metadata), {}


def _widened(view: Checkpoint, family: Family) -> dict[str, Change]:
    """Return what llama.cpp wants in f32 (``GgufFormat.exempt``)."""
    found = {}
    for name, tensor in view.items():
        plus = 1.0 if family.shifted and name.endswith("norm.weight") else 0.0
        vector = name.endswith("ffn_gate_inp_shexp.weight") and tensor.shape[:1] == (1,)
        if not _is_small(name, tensor) or (tensor.dtype == "f32" and not plus and not vector):
            continue
        found[name] = Change("f32", plus, tensor.shape[1:] if vector else None)
    return found


def _narrowed(view: Checkpoint, family: Family, plan: TensorPlan) -> dict[str, Change]:
    """Return what becomes of small tensors in f32: the type of the others, where it holds their values."""
    main = _main_type(view)
    before = {new: old for old, new in plan.names.items()}
    found = {}
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
            found[name] = Change(main if fits else "f32", plus, shape)
    return found


def _comes_back(tensor: Tensor, wanted: Change) -> bool:
    """Whether what was added can be taken off again without a trace."""
    return bool(np.array_equal(wanted.values(tensor) - np.float32(wanted.plus), tensor.numpy("f32")))


def _is_small(name: str, tensor: Tensor) -> bool:
    """Whether llama.cpp keeps a tensor in f32, by its name there."""
    small = GgufFormat().required_dtype(name, tensor.shape) is not None
    return small and tensor.codec == DenseLayout.codec and tensor.dtype in _FLOATS


def _main_type(view: Checkpoint) -> str:
    sizes: Counter[str] = Counter()
    for tensor in view.values():
        if tensor.codec == DenseLayout.codec and tensor.dtype in _FLOATS and len(tensor.shape) > 1:
            sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "f32"


def _labelled(checkpoint: Checkpoint, label: Mapping[str, Any], **changes: Unpack[Attributes]) -> Checkpoint:
    """Return the checkpoint with the metadata of a label, its companions (names to text) if any, and other changes."""
    with ExitStack() as stack:
        folder = None if label["companions"] is None else TemporaryFolder(label["companions"])
        if folder is not None:
            stack.callback(folder.close)
        said = {"metadata": sorted(label["metadata"]), "companions": sorted(label["companions"] or ())}
        tensors = LazyMap(checkpoint, checkpoint.__getitem__)
        changes["metadata"] = label["metadata"]
        changes["companions"] = {**checkpoint.companions, **(folder.paths if folder is not None else {})}
        return derive_checkpoint(
            checkpoint, tensors, _labelled, dict(label), said, also_close=stack.pop_all().close, **changes
        )


def _unread(metadata: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield the keys of metadata that neither a file of the folder holds, nor say a thing that needs no file."""
    about = {f"general.{name}" for name in ("architecture", "type", "alignment", "file_type", "quantization_version")}
    read = {ABOUT, WHOLE, *about, *hyper.read_keys(family), *keys.READ}
    whole = (PREFIX, f"{keys.TEMPLATE}.", *(("tokenizer.",) if companions.kept(metadata) else ()))
    for key, value in metadata.items():
        if key not in read and not key.startswith(whole) and not (value == 0 and key.startswith(f"{family.arch}.")):
            yield key


def _lost(what: Sequence[str]) -> list[str]:
    return [f"not carried over: {'; '.join(what)}"] if what else []
