"""Views of a model folder as llama.cpp has it, and of a GGUF file as transformers has it (``spec/architectures.md``).

Rows are put in order and experts stacked in the packed form; only small vectors are computed, in f32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.core.config import CONFIG
from ingot.core.floats import cast
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.gguf.metadata import ABOUT, carried, with_values
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.lazy import Lazy
from ingot.model.tensor import Array, Tensor
from ingot.model.view import derived
from ingot.ops.architectures import companions, hyper, numbers, rotary
from ingot.ops.architectures.apart import apart, has_parted, together
from ingot.ops.architectures.companions import PREFIX, TOKENIZER, WHOLE
from ingot.ops.architectures.families import FAMILIES, Family, family_of
from ingot.ops.architectures.keys import TEMPLATE
from ingot.ops.architectures.names import Names
from ingot.ops.architectures.translated import Translated
from ingot.ops.views.dense import Change, add, change
from ingot.ops.views.names import omit, rename
from ingot.ops.views.rows import permute, stack, take, unstack
from ingot.ops.views.second import join_seconds, part_seconds, rounded_seconds
from ingot.stores.temporary import TemporaryFolder

_EMBEDDING, _POSITIONS = "token_embd.weight", "position_embd.weight"
_MOST_EXPERTS, _MOST_LAYERS = 1 << 16, 1 << 20
_DERIVED = ("rotary_emb.inv_freq", "embeddings.position_ids")
SCALE_NAMES = (".scale", ".input_scale")
"""Endings of tensors that are one number of a layer."""
_FLOATS = ("f32", "f16", "bf16")


@dataclass(slots=True)
class _Plan:
    """What becomes of tensors, by their old names: stacks by their new ones."""

    names: dict[str, str] = field(default_factory=dict)
    order: dict[str, Array] = field(default_factory=dict)
    dropped: dict[str, Omission] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def to_gguf(checkpoint: Checkpoint) -> Translated:
    """Return a model folder's checkpoint as llama.cpp has it; itself, with a note, where its kind is not known.

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.config``, ``architecture.rows``, ``architecture.unknown``.
    FormatError
        ``architecture.companion``: ``config.json`` is no JSON object.
    """
    files = companions.read_files(checkpoint.companions) if CONFIG in checkpoint.companions else {}
    config = companions.parsed(files, CONFIG)
    if not config:
        return Translated(checkpoint)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind = config.get("model_type")
        why = (
            "config.json states no model_type"
            if kind is None
            else f"no names of llama.cpp are known for model_type {str(kind)[:80]!r}"
        )
        return Translated(checkpoint, [f"names stay as they are: {why}"])
    own, parted = checkpoint, has_parted(checkpoint)
    checkpoint = apart(part_seconds(checkpoint), config, family, parted=parted)
    plan = _plan_to_gguf(checkpoint, config, family)
    if plan.unknown:
        known = f"llama.cpp's {family.arch} has no {', '.join(plan.unknown[:3])}"
        return Translated(own, [f"names stay as they are: {known}"])
    typed, lost = hyper.to_metadata(config, family, parted=parted)
    rows = next((checkpoint[old].shape[0] for old, new in plan.names.items() if new == _EMBEDDING), 0)
    words, unsaid = companions.words(files, rows)
    if "chat_template.jinja" in files:
        words.setdefault(TEMPLATE, ("string", files["chat_template.jinja"]))
    if TOKENIZER not in files:  # what SentencePiece trained knows less of special tokens than the model
        words = {key: value for key, value in words.items() if key not in typed}
    kept = {key: value for key, value in checkpoint.metadata.items() if key not in ("format", ABOUT)}
    metadata = with_values(carried(kept), {**typed, **words, **companions.to_metadata(files)})
    view = _stacked(checkpoint, plan)
    if family.padded and _POSITIONS in view:
        view, before = _behind_padding(view, config)
        lost.append(f"the first {before} rows of {_POSITIONS}, those of padding")
    if factors := {} if family.rope is None else rotary.tensors(config, family):
        view = add(view, factors)
    changes = _widened(view, family)
    rounded = [name for name, wanted in changes.items() if wanted.plus and not _comes_back(view[name], wanted)]
    lost += [f"the last bits of {', '.join(rounded[:3])}, of which 1 + w is rounded"] if rounded else []
    if inverted := rounded_seconds(own):
        lost.append(
            f"the last bits in f32 of {', '.join(inverted[:3])} ({len(inverted)} tensors): scales were divided by "
            "a number and are multiplied by its reciprocal here: values are equal in their own type"
        )
    return Translated(
        _labelled(change(view, changes), {"metadata": metadata, "companions": None}),
        _lost([*lost, *unsaid]),
        _told(plan, f"llama.cpp's architecture {family.arch}"),
        _named(plan, inverted),
    )


def _named(plan: _Plan, names: Collection[str]) -> frozenset[str]:
    """Return what tensors are called afterwards, each or in a stack with others."""
    stacks = (new for new, members in plan.stacks.items() if not set(names).isdisjoint(members))
    return frozenset((*stacks, *(plan.names[name] for name in names if name in plan.names)))


def _behind_padding(view: Checkpoint, config: Mapping[str, Any]) -> tuple[Checkpoint, int]:
    """Return the view less the positions that no token has, and their number; refused where there are no others."""
    before, shape = hyper.positions_before(config), view[_POSITIONS].shape
    if len(shape) != 2 or shape[0] <= before:
        raise UnsupportedError(
            f"expected more than {before} rows of positions, found shape {list(shape)}; --keep-names leaves them",
            rule="architecture.rows",
            where=_POSITIONS,
        )
    return take(view, {_POSITIONS: slice(before, None)}), before


def to_model(checkpoint: Checkpoint) -> Translated:
    """Return a GGUF file's checkpoint as transformers has it, with the files of its folder.

    Raises
    ------
    MissingExtraError
        The package gguf is not installed.
    UnsupportedError
        ``architecture.config``, ``architecture.rows``, ``architecture.unknown``.
    """
    metadata = checkpoint.metadata
    arch = str(metadata.get("general.architecture"))
    family, stated = _family(metadata, arch)
    if family is None:
        said = "general.architecture" in metadata
        why = f"architecture {arch[:80]!r} is not known" if said else "metadata have no general.architecture"
        return Translated(checkpoint, [f"names stay as they are: {why}"])
    own, checkpoint = checkpoint, join_seconds(checkpoint)
    heads = stated.get("architectures") not in (None, [family.model_class])
    plan = _plan_to_model(checkpoint, metadata, family, base=family.base if heads else "")
    if plan.unknown:
        return Translated(own, [f"names stay as they are: {family.model_type} has no {', '.join(plan.unknown[:3])}"])
    notes = list[str]()
    view = _unstacked(checkpoint, plan)
    changes, position = _narrowed(view, family, plan), plan.names.get(_POSITIONS)
    if family.padded and position is not None and len(view[position].shape) == 2:
        rows = hyper.positions_before(stated or {"pad_token_id": metadata.get("tokenizer.ggml.padding_token_id")})
        changes[position] = replace(changes.get(position, Change(view[position].dtype)), above=rows)
    view = change(view, changes)
    dropped = {name: checkpoint[name] for name in plan.dropped if checkpoint[name].size <= rotary.MOST_FACTORS}
    factors = {name: tensor.numpy("f32") for name, tensor in dropped.items() if _is_small(name, tensor)}
    config, changed = hyper.to_config(metadata, family, list(view), factors), list[str]()
    config["dtype"] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(_main_type(view), "float32")
    if stated:
        config, changed = hyper.merged(stated, config, family)
    view = together(view, config, family)
    if changed:
        notes.append(
            f"the GGUF metadata differ from the config.json that the file keeps; they count for {', '.join(changed)}"
        )
    files, unsaid = companions.files_of(metadata, config)
    known = bool(stated) or "long_factor" in rotary.rope_of(config)
    if not known:
        unstated = Omission("config.json has no key for this scaling of the rotary embedding")
        view.omissions = {**view.omissions, **dict.fromkeys(plan.dropped, unstated)}
    lost = list(unsaid)
    keys = [key for key in metadata if not _is_known(key, arch)]
    if keys:
        lost.append(f"metadata {', '.join(keys[:6])}" + (f" and {len(keys) - 6} more" if len(keys) > 6 else ""))
    return Translated(
        _labelled(view, {"metadata": {"format": "pt"}, "companions": files}),
        [*notes, *_lost(lost)],
        _told(plan, f"transformers' {family.model_class}"),
    )


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


def _plan_to_gguf(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> _Plan:
    names, plan = Names(family), _Plan()
    stacks: dict[str, dict[int, str]] = {}
    layers = config.get("num_hidden_layers")
    layers = layers if type(layers) is int else _MOST_LAYERS
    for name in checkpoint:
        expert, layer = names.expert(name), names.layer(name)
        if layer is not None and layer[0] >= layers:
            plan.dropped[name] = Omission(f"config.json has {layers} layers; later ones predict further tokens")
        elif expert is not None:
            stacks.setdefault(expert.stacked, {})[expert.number] = name
        elif name.endswith(_DERIVED):
            plan.dropped[name] = Omission("llama.cpp computes it", superseded=True)
        elif family.left_out and name.removeprefix(family.base).startswith(family.left_out):
            plan.dropped[name] = Omission(f"not used by llama.cpp's {family.arch}", superseded=True)
        elif (found := names.to_gguf(name)) is None:
            plan.unknown.append(name)
        else:
            plan.names[name] = found
    for new, members in stacks.items():
        if sorted(members) != list(range(len(members))):
            plan.unknown.append(f"{new} of experts {sorted(members)[:4]}")
        plan.stacks[new] = [members[number] for number in sorted(members)]
    if family.permuted and not plan.unknown:
        _order(plan, checkpoint, numbers.heads(config), forth=True)
    return plan


def _plan_to_model(checkpoint: Checkpoint, metadata: Mapping[str, Any], family: Family, base: str) -> _Plan:
    names, plan = Names(family, base), _Plan()
    for name in checkpoint:
        shape = checkpoint[name].shape
        members = names.experts(name, shape[0]) if shape and shape[0] <= _MOST_EXPERTS else None
        if members is not None:
            plan.stacks[name] = members
        elif name in rotary.TENSORS:
            plan.dropped[name] = Omission("config.json states the scaling of the rotary embedding", superseded=True)
        elif (found := names.to_model(name)) is None:
            plan.unknown.append(name)
        else:
            plan.names[name] = found
    if family.permuted and not plan.unknown:
        counts = {
            key: metadata.get(f"{family.arch}.attention.{name}")
            for key, name in (("num_attention_heads", "head_count"), ("num_key_value_heads", "head_count_kv"))
        }
        _order(plan, checkpoint, numbers.heads(counts), forth=False)
    return plan


def _order(plan: _Plan, checkpoint: Checkpoint, heads: tuple[int, int], *, forth: bool) -> None:
    """Note in which order rows of q and k go; raises ``UnsupportedError`` ``architecture.rows``."""
    for old, new in plan.names.items():
        module = (new if forth else old).rpartition(".")[0].rpartition(".")[2]
        if module not in ("attn_q", "attn_k") or old.endswith(SCALE_NAMES):
            continue
        count, shape = heads[module == "attn_k"], checkpoint[old].shape
        if not shape or shape[0] % (2 * count):
            raise UnsupportedError(
                f"expected rows of {count} heads in halves, found shape {list(shape)}; --keep-names leaves them",
                rule="architecture.rows",
                where=old,
            )
        halves = (count, 2, shape[0] // count // 2) if forth else (count, shape[0] // count // 2, 2)
        plan.order[old] = np.arange(shape[0]).reshape(halves).swapaxes(1, 2).reshape(-1)


def _stacked(checkpoint: Checkpoint, plan: _Plan) -> Checkpoint:
    view = omit(checkpoint, plan.dropped)
    view = permute(view, plan.order) if plan.order else view
    view = stack(view, plan.stacks) if plan.stacks else view
    return rename(view, plan.names)


def _unstacked(checkpoint: Checkpoint, plan: _Plan) -> Checkpoint:
    view = omit(checkpoint, plan.dropped)
    view = permute(view, plan.order) if plan.order else view
    view = unstack(view, plan.stacks) if plan.stacks else view
    return rename(view, plan.names)


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


def _narrowed(view: Checkpoint, family: Family, plan: _Plan) -> dict[str, Change]:
    """Return what becomes of small tensors in f32: the type of the others, where it holds their values."""
    main, before = _main_type(view), {new: old for old, new in plan.names.items()}
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
    small = GgufFormat().exempt(name, tensor.shape) is not None
    return small and tensor.codec == DenseLayout.codec and tensor.dtype in _FLOATS


def _main_type(view: Checkpoint) -> str:
    sizes: Counter[str] = Counter()
    for tensor in view.values():
        if tensor.codec == DenseLayout.codec and tensor.dtype in _FLOATS and len(tensor.shape) > 1:
            sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "f32"


def _labelled(checkpoint: Checkpoint, label: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with other metadata and, where they are given, companions: names to text."""
    with ExitStack() as stack:
        folder = None if label["companions"] is None else TemporaryFolder(label["companions"])
        if folder is not None:
            stack.callback(folder.close)
        said = {"metadata": sorted(label["metadata"]), "companions": sorted(label["companions"] or ())}
        tensors = Lazy(checkpoint, checkpoint.__getitem__)
        view = derived(checkpoint, tensors, _labelled, dict(label), said, also_close=stack.pop_all().close)
    view.metadata = dict(label["metadata"])
    view.companions = {**checkpoint.companions, **(folder.paths if folder is not None else {})}
    return view


def _is_known(key: str, arch: str) -> bool:
    """Whether a key of metadata is kept in the folder's files, or says nothing of the model."""
    if key in (ABOUT, WHOLE) or key.startswith((PREFIX, f"{arch}.", "tokenizer.")):
        return True
    return key in {
        f"general.{name}" for name in ("architecture", "type", "alignment", "file_type", "quantization_version")
    }


def _told(plan: _Plan, whose: str) -> str:
    parts = [f"{len(plan.names)} tensors have the names of {whose}"]
    parts += [f"{len(plan.order)} of them its order of rows"] if plan.order else []
    parts += [f"{len(plan.stacks)} stacks of experts are put together or taken apart"] if plan.stacks else []
    return "; ".join(parts)


def _lost(what: Sequence[str]) -> list[str]:
    return [f"not carried over: {'; '.join(what)}"] if what else []
