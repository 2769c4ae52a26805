"""Plans for converting a model's tensors: new names, orders of rows, stacks of experts, and omissions."""

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
from ingot.translate import config_numbers, next_token, rotary, superseded
from ingot.translate.families import Family, has_classifier
from ingot.translate.names import Names
from ingot.translate.text_models import is_other_part
from ingot.views.names import omit, rename
from ingot.views.rows import concatenate, permute, stack, unstack

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
POSITIONS = "position_embd.weight"
CLASSES = "cls.output.weight"
_LM_HEAD = "lm_head.weight"
SCALE_NAMES = (".scale", ".input_scale")
"""Name endings of scales in llama.cpp. They have one number per matrix, so their rows are never reordered."""
PROGRAM = "llama.cpp"
ROWS = "architecture.rows"
_MAX_EXPERTS = 1 << 16
_MAX_LAYERS = 1 << 20


@dataclass(slots=True)
class TensorPlan:
    """The conversion of each tensor.

    Parameters
    ----------
    names : dict
        New names of unstacked tensors, by old names.
    order : dict
        For each tensor whose rows are reordered: the order, by old names.
    stacks : dict
        Names of the experts' tensors, by the name of the stack that contains them. In a conversion to llama.cpp, these
        are old names; in a conversion to transformers, new names.
    omissions : dict
        Reasons why tensors are dropped, by old names.
    """

    names: dict[str, str] = field(default_factory=dict)
    order: dict[str, Array] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    omissions: dict[str, Omission] = field(default_factory=dict)

    def old_name(self, new: str) -> str | None:
        """Return the old name of the tensor that gets the name ``new``; None if no tensor does."""
        return next((old for old, name in self.names.items() if name == new), None)

    def describe(self, target: str) -> str:
        """Return a sentence about the renamed, reordered and stacked tensors."""
        parts = [f"{len(self.names)} tensors have the names of {target}"]
        parts += [f"{len(self.order)} of them its order of rows"] if self.order else []
        parts += [f"{len(self.stacks)} stacks of experts are put together or taken apart"] if self.stacks else []
        return "; ".join(parts)


def plan_to_gguf(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> TensorPlan:
    """Return the plan that converts a folder's tensors to llama.cpp, by transformers' names.

    A tensor without a name in llama.cpp is an omission: superseded if llama.cpp does not need its values, else dropped.

    Raises ``UnsupportedError`` ``architecture.rows``: the number of rows is not a multiple of the heads, or experts are
    missing; ``architecture.unknown``.
    """
    classifier = has_classifier(family, checkpoint)
    names = Names(family, has_classifier=classifier)
    plan = TensorPlan()
    stacks: dict[str, dict[int, str]] = {}
    layers = config.get("num_hidden_layers")
    layers = layers + next_token.count_layers(checkpoint, config, family) if type(layers) is int else _MAX_LAYERS
    for name in checkpoint:
        expert = names.expert(name)
        layer = names.layer(name)
        omission = superseded.activation_scale(checkpoint, name, PROGRAM, for_blocks=True)
        if layer is not None and layer[0] >= layers:
            plan.omissions[name] = Omission(f"config.json has {layers} layers; later ones predict further tokens")
        elif omission is not None:
            plan.omissions[name] = omission
        elif layer is not None and layer[1] in family.scalars:
            key, _ = family.scalars[layer[1]]
            plan.omissions[name] = Omission(f"the metadata hold its value as {key}", superseded=True)
        elif expert is not None:
            stacks.setdefault(expert.stacked, {})[expert.expert] = name
        elif (new := names.to_gguf(name)) is not None:
            plan.names[name] = new
        else:
            plan.omissions[name] = _omission_without_name(checkpoint, name, config, family)
    for new, members in stacks.items():
        _require_every_expert(new, members)
        plan.stacks[new] = [members[index] for index in sorted(members)]
    if family.tied and _LM_HEAD in checkpoint:
        plan.omissions[_LM_HEAD] = _omitted_head(checkpoint, plan)
    if family.permuted:
        _order_rows(plan, checkpoint, config_numbers.heads(config), to_gguf=True)
    return plan


def plan_to_model(checkpoint: Checkpoint, metadata: Mapping[str, Any], family: Family, base: str) -> TensorPlan:
    """Return the plan that converts a GGUF file's tensors to transformers, by llama.cpp's names.

    ``base`` is the prefix of transformers' names (see ``Names``).

    Raises ``UnsupportedError`` ``architecture.rows``: the number of rows is not a multiple of the heads;
    ``architecture.unknown``. Raises ``MissingExtraError`` if the package gguf is not installed.
    """
    names = Names(family, base, has_classifier=CLASSES in checkpoint)
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
            key: config_numbers.largest(metadata.get(f"{family.arch}.attention.{name}"))
            for key, name in (("num_attention_heads", "head_count"), ("num_key_value_heads", "head_count_kv"))
        }
        _order_rows(plan, checkpoint, config_numbers.heads(counts), to_gguf=False)
    return plan


def apply_to_gguf(checkpoint: Checkpoint, plan: TensorPlan) -> Checkpoint:
    """Return the checkpoint converted by a plan of ``plan_to_gguf``."""
    view = _omit_and_reorder(checkpoint, plan)
    scalars = {new: members for new, members in plan.stacks.items() if _are_vectors(checkpoint, new, members)}
    matrices = {new: members for new, members in plan.stacks.items() if new not in scalars}
    view = concatenate(view, scalars) if scalars else view
    view = stack(view, matrices) if matrices else view
    return rename(view, plan.names)


def apply_to_model(checkpoint: Checkpoint, plan: TensorPlan) -> Checkpoint:
    """Return the checkpoint converted by a plan of ``plan_to_model``."""
    view = _omit_and_reorder(checkpoint, plan)
    view = unstack(view, plan.stacks) if plan.stacks else view
    return rename(view, plan.names)


def _omit_and_reorder(checkpoint: Checkpoint, plan: TensorPlan) -> Checkpoint:
    view = omit(checkpoint, plan.omissions)
    return permute(view, plan.order) if plan.order else view


def _are_vectors(checkpoint: Checkpoint, stacked_name: str, members: list[str]) -> bool:
    """Return whether all members of a stack have one element, so that they are joined into a vector."""
    return stacked_name.endswith(SCALE_NAMES) and all(checkpoint[name].shape == (1,) for name in members)


def _omission_without_name(checkpoint: Checkpoint, name: str, config: Mapping[str, Any], family: Family) -> Omission:
    """Return the omission of a tensor that has no name in llama.cpp."""
    if name.endswith(superseded.FREQUENCIES):
        difference = superseded.changed_frequencies(checkpoint[name], config, family)
        if difference is not None:
            return difference
    superseded_omission = superseded.superseded(checkpoint, name, PROGRAM)
    if superseded_omission is not None:
        return superseded_omission
    if family.unused and name.removeprefix(family.base).startswith(family.unused):
        return Omission(f"not used by {PROGRAM}'s {family.arch}", superseded=True)
    if is_other_part(name):
        return Omission("another part of the model: --part text leaves it out, --part mmproj converts the vision part")
    return Omission(f"{PROGRAM}'s {family.arch} has no such tensor")


def _omitted_head(checkpoint: Checkpoint, plan: TensorPlan) -> Omission:
    """Return the omission of a separate head; it is superseded if it equals the embedding, which llama.cpp uses
    instead.
    """
    head = checkpoint[_LM_HEAD]
    embedding = plan.old_name(EMBEDDING)
    embedding_tensor = None if embedding is None else checkpoint[embedding]
    if embedding_tensor is not None and same_type(head, embedding_tensor) and equal_values(head, embedding_tensor):
        return Omission(f"the values of {embedding}, which {PROGRAM} uses as the head", superseded=True)
    return Omission(f"{PROGRAM} uses the embedding as the head, but the head's values differ")


def _require_every_expert(new: str, members: Mapping[int, str]) -> None:
    if sorted(members) != list(range(len(members))):
        missing = [expert for expert in range(max(members)) if expert not in members]
        raise UnsupportedError(
            f"expected each expert from 0 to {max(members)}, but {str(missing[:8])[1:-1]} is missing; "
            "--keep-names leaves the tensors as they are",
            rule=ROWS,
            where=new,
        )


def _order_rows(plan: TensorPlan, checkpoint: Checkpoint, heads: tuple[int, int], *, to_gguf: bool) -> None:
    """Add the order of rows of q and k to the plan; raises ``UnsupportedError`` ``architecture.rows``."""
    for old, new in plan.names.items():
        module = (new if to_gguf else old).rpartition(".")[0].rpartition(".")[2]
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
        halves = (count, 2, shape[0] // count // 2) if to_gguf else (count, shape[0] // count // 2, 2)
        plan.order[old] = np.arange(shape[0]).reshape(halves).swapaxes(1, 2).reshape(-1)
