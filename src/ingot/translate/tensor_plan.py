"""Plans of tensors that change programs: new names, order of rows, stacks of experts, and omissions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.artifacts.identity import equal_values, same_type
from ingot.errors import UnsupportedError
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.translate import numbers, rotary, superseded
from ingot.translate.families import Family, classifies
from ingot.translate.names import Names
from ingot.views.names import omit, rename
from ingot.views.rows import concatenate, permute, stack, unstack

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
POSITIONS = "position_embd.weight"
CLASSES = "cls.output.weight"
_LM_HEAD = "lm_head.weight"
SCALE_NAMES = (".scale", ".input_scale")
"""Endings of tensors that are one number of a layer."""
PROGRAM = "llama.cpp"
ROWS = "architecture.rows"
_MAX_EXPERTS = 1 << 16
_MAX_LAYERS = 1 << 20


@dataclass(slots=True)
class TensorPlan:
    """What becomes of each tensor.

    Parameters
    ----------
    names : dict
        New names by old ones, of tensors that stay single.
    order : dict
        The rows of tensors whose rows change places, by old names.
    stacks : dict
        Members by the name of the stack; of the way back, the stack's members by its name.
    omissions : dict
        Why tensors are left out, by old names.
    """

    names: dict[str, str] = field(default_factory=dict)
    order: dict[str, Array] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    omissions: dict[str, Omission] = field(default_factory=dict)

    def old_name(self, new: str) -> str | None:
        """Return the tensor that gets a name; None if none does."""
        return next((old for old, name in self.names.items() if name == new), None)

    def describe(self, whose: str) -> str:
        """Return a sentence about the tensors that get the names of a program."""
        parts = [f"{len(self.names)} tensors have the names of {whose}"]
        parts += [f"{len(self.order)} of them its order of rows"] if self.order else []
        parts += [f"{len(self.stacks)} stacks of experts are put together or taken apart"] if self.stacks else []
        return "; ".join(parts)


def plan_to_gguf(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> TensorPlan:
    """Return the plan of a folder's tensors, by transformers' names.

    A tensor without a name in llama.cpp is an omission: superseded if llama.cpp has no use for its values, else lost.

    Raises ``UnsupportedError`` ``architecture.rows``: rows that are not whole heads, or experts that are missing;
    ``architecture.unknown``.
    """
    classifier = classifies(family, checkpoint)
    names = Names(family, classifies=classifier)
    plan = TensorPlan()
    stacks: dict[str, dict[int, str]] = {}
    layers = config.get("num_hidden_layers")
    layers = layers if type(layers) is int else _MAX_LAYERS
    for name in checkpoint:
        expert = names.expert(name)
        layer = names.layer(name)
        omission = superseded.activation_scale(checkpoint, name, PROGRAM, for_blocks=True)
        if layer is not None and layer[0] >= layers:
            plan.omissions[name] = Omission(f"config.json has {layers} layers; later ones predict further tokens")
        elif omission is not None:
            plan.omissions[name] = omission
        elif expert is not None:
            stacks.setdefault(expert.stacked, {})[expert.number] = name
        elif (new := names.to_gguf(name)) is not None:
            plan.names[name] = new
        else:
            plan.omissions[name] = _unnamed(checkpoint, name, config, family)
    for new, members in stacks.items():
        _require_every_expert(new, members)
        plan.stacks[new] = [members[number] for number in sorted(members)]
    if family.tied and _LM_HEAD in checkpoint:
        plan.omissions[_LM_HEAD] = _head(checkpoint, plan)
    if family.permuted:
        _order_rows(plan, checkpoint, numbers.heads(config), forth=True)
    return plan


def plan_to_model(checkpoint: Checkpoint, metadata: Mapping[str, Any], family: Family, base: str) -> TensorPlan:
    """Return the plan of a GGUF file's tensors, by llama.cpp's names; ``base`` and errors as ``Names``.

    Raises ``UnsupportedError`` ``architecture.rows``: rows that are not whole heads.
    """
    names = Names(family, base, classifies=CLASSES in checkpoint)
    plan = TensorPlan()
    for name in checkpoint:
        shape = checkpoint[name].shape
        members = names.experts(name, shape[0]) if shape and shape[0] <= _MAX_EXPERTS else None
        if members is not None:
            plan.stacks[name] = members
        elif name in rotary.TENSORS:
            plan.omissions[name] = Omission("config.json states the scaling of the rotary embedding", superseded=True)
        elif (new := names.to_model(name)) is None:
            plan.omissions[name] = Omission(f"transformers' {family.model_type} has no such tensor")
        else:
            plan.names[name] = new
    if family.permuted:
        counts = {
            key: metadata.get(f"{family.arch}.attention.{name}")
            for key, name in (("num_attention_heads", "head_count"), ("num_key_value_heads", "head_count_kv"))
        }
        _order_rows(plan, checkpoint, numbers.heads(counts), forth=False)
    return plan


def stacked(checkpoint: Checkpoint, plan: TensorPlan) -> Checkpoint:
    """Return the checkpoint as ``plan_to_gguf`` says."""
    view = _ordered(checkpoint, plan)
    scalars = {new: members for new, members in plan.stacks.items() if _are_vectors(checkpoint, new, members)}
    matrices = {new: members for new, members in plan.stacks.items() if new not in scalars}
    view = concatenate(view, scalars) if scalars else view
    view = stack(view, matrices) if matrices else view
    return rename(view, plan.names)


def unstacked(checkpoint: Checkpoint, plan: TensorPlan) -> Checkpoint:
    """Return the checkpoint as ``plan_to_model`` says."""
    view = _ordered(checkpoint, plan)
    view = unstack(view, plan.stacks) if plan.stacks else view
    return rename(view, plan.names)


def _ordered(checkpoint: Checkpoint, plan: TensorPlan) -> Checkpoint:
    view = omit(checkpoint, plan.omissions)
    return permute(view, plan.order) if plan.order else view


def _are_vectors(checkpoint: Checkpoint, stacked_name: str, members: list[str]) -> bool:
    """Return whether numbers of single experts are stored as vectors of one element: together they are one vector."""
    return stacked_name.endswith(SCALE_NAMES) and all(checkpoint[name].shape == (1,) for name in members)


def _unnamed(checkpoint: Checkpoint, name: str, config: Mapping[str, Any], family: Family) -> Omission:
    """Return why a tensor that has no name in llama.cpp is left out."""
    if name.endswith(superseded.FREQUENCIES):
        other = superseded.frequencies(checkpoint[name], config, family)
        if other is not None:
            return other
    needless = superseded.superseded(checkpoint, name, PROGRAM)
    if needless is not None:
        return needless
    if family.unused and name.removeprefix(family.base).startswith(family.unused):
        return Omission(f"not used by {PROGRAM}'s {family.arch}", superseded=True)
    return Omission(f"{PROGRAM}'s {family.arch} has no such tensor")


def _head(checkpoint: Checkpoint, plan: TensorPlan) -> Omission:
    """Return why a head is left out, of an architecture without one: lost if its values are not the embedding's."""
    head = checkpoint[_LM_HEAD]
    embedding = plan.old_name(EMBEDDING)
    other = None if embedding is None else checkpoint[embedding]
    if other is not None and same_type(head, other) and equal_values(head, other):
        return Omission(f"the values of {embedding}, which {PROGRAM} takes for it", superseded=True)
    return Omission(f"{PROGRAM} takes the embedding for the head, whose values are others")


def _require_every_expert(new: str, members: Mapping[int, str]) -> None:
    if sorted(members) != list(range(len(members))):
        missing = [number for number in range(max(members)) if number not in members]
        raise UnsupportedError(
            f"expected each expert from 0 to {max(members)}, found none numbered {str(missing[:8])[1:-1]}; "
            "--keep-names leaves the tensors as they are",
            rule=ROWS,
            where=new,
        )


def _order_rows(plan: TensorPlan, checkpoint: Checkpoint, heads: tuple[int, int], *, forth: bool) -> None:
    """Note the order of rows of q and k; raises ``UnsupportedError`` ``architecture.rows``."""
    for old, new in plan.names.items():
        module = (new if forth else old).rpartition(".")[0].rpartition(".")[2]
        if module not in ("attn_q", "attn_k") or old.endswith(SCALE_NAMES):
            continue
        count = heads[module == "attn_k"]
        shape = checkpoint[old].shape
        if not shape or shape[0] % (2 * count):
            raise UnsupportedError(
                f"expected rows of {count} heads in halves, found shape {list(shape)}; --keep-names leaves them",
                rule=ROWS,
                where=old,
            )
        halves = (count, 2, shape[0] // count // 2) if forth else (count, shape[0] // count // 2, 2)
        plan.order[old] = np.arange(shape[0]).reshape(halves).swapaxes(1, 2).reshape(-1)
