"""Match an adapter with a base: each change gets the name and the orientation of a tensor of the base."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from ingot.adapters.names import expert_of, name_table, stack_experts, to_gguf_changes, to_model_changes
from ingot.adapters.record import Adapter, Addition, Change, LowRank, Replacement
from ingot.artifacts.companions import companion_config, is_translated
from ingot.core.numeric.dtypes import FLOATS
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Tensor

RULE = "adapter.base"
SHAPE_RULE = "adapter.shape"

_LISTED = 3
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.", "transformer.")
_TRANSPOSED_MODULES = re.compile(r"\.(c_attn|c_proj|c_fc|q_attn)\.weight\Z")
"""Modules of transformers' class Conv1D, whose weights are stored as [inputs, outputs]."""
_TRANSPOSED_FAMILIES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_TRANSPOSED_EXPERTS = ("gpt_oss", "llama4", "llama4_text")
"""Families whose fused experts are stored as [experts, inputs, outputs]."""
_EXPERTS = re.compile(
    r"(?P<start>.+)\.(?:mlp\.experts|mlp\.switch_mlp|block_sparse_moe\.switch_mlp)\.(?P<part>\w+?)(?:\.weight)?\Z"
)
# For checkpoints that store experts separately: the experts' block, and its modules for gate, up and down.
_SEPARATE = (
    ("mlp.experts", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}),
    ("block_sparse_moe.experts", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
)
_EXPERT = re.compile(
    r"(?P<start>.+)\.(?P<block>mlp\.experts|block_sparse_moe\.experts)\.(?P<index>[0-9]{1,6})\.(?P<part>\w+)\.weight\Z"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def match(adapter: Adapter, base: Checkpoint) -> dict[str, list[Change]]:
    """Return the changes of an adapter, keyed by the base's tensor names and in the orientation of the base's tensors.

    Raises
    ------
    UnsupportedError
        ``adapter.base``: the base lacks tensors that the adapter changes. ``adapter.shape``: a tensor has another
        shape. Both mean that the adapter belongs to another model. ``adapter.unsupported``: a change that cannot be
        translated. ``adapter.tensors``: a tensor of the base has no floating-point values. ``architecture.*``: names
        that cannot be translated.
    """
    changes = {name: list(items) for name, items in adapter.changes.items()}
    is_gguf = adapter.writer == "gguf"
    if is_translated(base):  # llama.cpp stores every weight as [outputs, inputs]
        changes = {
            name: [item.plain() if isinstance(item, LowRank) else item for item in items]
            for name, items in changes.items()
        }
    if is_translated(base) != is_gguf:
        table = name_table(base)
        changes = (
            to_model_changes(changes, table)
            if is_gguf
            else to_gguf_changes(with_split_experts(changes, table.stacks), table)
        )
    if not is_translated(base):
        changes = _with_base_names(changes, base)
    missing = [name for name in changes if name not in base]
    if missing:
        raise _missing_error(adapter, base, changes, missing)
    model_type = "" if is_translated(base) else str(companion_config(base.companions, RULE).get("model_type"))
    for name in changes:
        _require_floats(base[name])
    return {
        name: [fit(item, name, base[name].shape, adapter, model_type) for item in items]
        for name, items in changes.items()
    }


def _missing_error(
    adapter: Adapter, base: Checkpoint, changes: Mapping[str, Sequence[Change]], missing: Sequence[str]
) -> UnsupportedError:
    tied = " (the base ties its head to the embeddings)" if missing == ["lm_head.weight"] else ""
    listed = ", ".join(name[:120] for name in missing[:_LISTED])
    more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
    named = f"; it names the base {adapter.base[:100]!r}" if adapter.base else ""
    return UnsupportedError(
        f"the adapter changes {len(missing)} of {len(changes)} tensors that the base {base.location} lacks: "
        f"{listed}{more}{tied}{named}",
        rule=RULE,
        where=adapter.location,
    )


def _with_base_names(changes: Mapping[str, list[Change]], base: Checkpoint) -> dict[str, list[Change]]:
    """Return the changes, keyed by the base's tensor names.

    The base's names may have another prefix than the adapter's names. If the base stores experts separately,
    changes of stacks of experts are split. If the base stacks experts, changes of separate experts are stacked.
    """
    renamed: dict[str, list[Change]] = {}
    grouped: dict[str, dict[int, LowRank]] = {}
    prefix = _prefix(changes, base)
    for name, items in changes.items():
        candidate = name if name in base else f"{prefix[1]}{name.removeprefix(prefix[0])}"
        if candidate in base:
            renamed.setdefault(candidate, []).extend(items)
            continue
        separate = _separate_experts(candidate, items, base)
        stacked = _stacked_expert(candidate, items, base)
        if separate:
            for member, change in separate:
                renamed.setdefault(member, []).append(change)
        elif stacked is not None:
            stack, index, change = stacked
            grouped.setdefault(stack, {})[index] = change
        else:
            renamed.setdefault(name, []).extend(items)
    for stack, members in grouped.items():
        renamed.setdefault(stack, []).append(stack_experts(members, base[stack].shape[0], stack))
    return renamed


def with_prefix(changes: Mapping[str, Sequence[Change]], names: Container[str]) -> dict[str, Sequence[Change]]:
    """Return changes whose names have another prefix, chosen so that as many names as possible are among ``names``."""
    old, new = _prefix(changes, names)
    return {name if name in names else f"{new}{name.removeprefix(old)}": items for name, items in changes.items()}


def _prefix(changes: Mapping[str, object], base: Container[str]) -> tuple[str, str]:
    """Return the prefix to remove from the adapter's names and the prefix to add, so that the most results are in
    ``base``.
    """
    best = ("", "")
    best_count = sum(name in base for name in changes)
    for old in _PREFIXES:
        names = [name.removeprefix(old) for name in changes if name.startswith(old)]
        for new in _PREFIXES:
            count = sum(f"{new}{name}" in base for name in names)
            if count > best_count:
                best = (old, new)
                best_count = count
    return best


def _separate_experts(name: str, items: Sequence[Change], base: Container[str]) -> list[tuple[str, Change]]:
    """Return the changes of a stack of experts as pairs of the name of an expert's matrix and its change.

    Return an empty list if ``name`` is no stack of experts with low-rank changes, or if the base does not store its
    experts separately.
    """
    match = _EXPERTS.match(name)
    if match is None or not all(isinstance(item, LowRank) and len(item.a.shape) == 3 for item in items):
        return []
    parts = ("gate_proj", "up_proj") if match["part"] == "gate_up_proj" else (match["part"],)
    for block, modules in _SEPARATE:
        if parts[-1] not in modules or f"{match['start']}.{block}.0.{modules[parts[-1]]}.weight" not in base:
            continue
        return [
            (
                f"{match['start']}.{block}.{index}.{modules[part]}.weight",
                _half(expert_of(item, index), position, len(parts)),
            )
            for item in items
            if isinstance(item, LowRank)
            for index in range(item.a.shape[0])
            for position, part in enumerate(parts)
        ]
    return []


def _half(item: LowRank, position: int, count: int) -> LowRank:
    """Return the change of one range of rows: ``position`` is its index among ``count`` equal ranges of all rows."""
    rows = item.b.shape[0] // count
    return item if count == 1 else replace(item, b=item.b.take(np.arange(position * rows, (position + 1) * rows)))


def _stacked_expert(name: str, items: Sequence[Change], base: Checkpoint) -> tuple[str, int, LowRank] | None:
    """Return the name of the base's stack that contains an expert's matrix, the expert's index, and its change.

    Returns None if the base has no such stack.
    """
    match = _EXPERT.match(name)
    if match is None or len(items) != 1 or not isinstance(items[0], LowRank):
        return None
    part = _PARTS.get(match["part"], match["part"])
    for block in ("mlp.switch_mlp", "block_sparse_moe.switch_mlp"):
        stack = f"{match['start']}.{block}.{part}.weight"
        if stack in base and int(match["index"]) < base[stack].shape[0]:
            return stack, int(match["index"]), items[0]
    return None


def with_split_experts(
    changes: Mapping[str, list[Change]], stacks: Mapping[str, Sequence[str]]
) -> dict[str, list[Change]]:
    """Return ``changes``, with each change of a stack of experts replaced by one change per expert.

    ``stacks`` maps the names of stacks to the names of their experts. A change is returned as it is if it changes no
    stack, or if one of the experts is not in ``stacks``.
    """
    members = {name for names in stacks.values() for name in names}
    result: dict[str, list[Change]] = {}
    for name, items in changes.items():
        separate = _separate_in(name, items, members)
        for member, change in separate or [(name, item) for item in items]:
            result.setdefault(member, []).append(change)
    return result


def _separate_in(name: str, items: Sequence[Change], members: set[str]) -> list[tuple[str, Change]]:
    pairs = _separate_experts(name, items, members)
    return pairs if all(member in members for member, _ in pairs) else []


def fit(item: Change, name: str, shape: tuple[int, ...], adapter: Adapter, model_type: str) -> Change:
    """Return a change of the base's tensor ``name``, transposed if its orientation differs from ``shape``.

    Raises ``UnsupportedError`` ``adapter.shape`` if the change does not have this shape in any orientation.
    """
    for candidate in _orientations(item, name, shape, model_type):
        if _fits(candidate, shape):
            return replace(candidate, any_orientation=False) if isinstance(candidate, LowRank) else candidate
    expected = item.values.shape if isinstance(item, Addition | Replacement) else item.shape
    raise UnsupportedError(
        f"the adapter was made for another base: its change has shape {list(expected)}, the tensor of "
        f"{adapter.base or 'the base'} {list(shape)}",
        rule=SHAPE_RULE,
        where=f"{adapter.location}: {name}",
    )


def is_transposed(name: str, model_type: str) -> bool:
    """Return whether a family stores a linear layer's weight as [inputs, outputs]."""
    return model_type in _TRANSPOSED_FAMILIES and _TRANSPOSED_MODULES.search(name) is not None


def _require_floats(tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise UnsupportedError(
            f"expected floating-point values in the base, found {tensor.dtype}",
            rule="adapter.tensors",
            where=tensor.name,
        )


def _orientations(item: Change, name: str, shape: tuple[int, ...], model_type: str) -> Iterator[Change]:
    if not isinstance(item, LowRank) or item.embedding:
        yield item
        return
    plain = item.plain()
    if item.any_orientation:
        first = model_type in _TRANSPOSED_EXPERTS
    elif model_type in _TRANSPOSED_FAMILIES and len(shape) == 2:
        first = is_transposed(name, model_type)
    else:
        first = item.transposed and not (model_type and len({*shape}) == 1)
    yield plain.transpose() if first else plain
    if item.any_orientation or item.transposed or model_type in _TRANSPOSED_FAMILIES:
        yield plain if first else plain.transpose()


def _fits(item: Change, shape: tuple[int, ...]) -> bool:
    if isinstance(item, Addition):
        return item.values.shape == shape
    if isinstance(item, Replacement):
        if item.rows is None:
            return item.values.shape == shape
        return len(shape) == 2 and item.values.shape[1:] == shape[1:] and max(item.rows) < shape[0]
    if len(item.a.shape) == 3:
        return item.shape == shape
    return len(shape) > 1 and item.shape == (shape[0], prod(shape[1:]))
