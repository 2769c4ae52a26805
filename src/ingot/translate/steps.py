"""Invertible transforms of a family's tensors, by transformers' names, between its layout and llama.cpp's.

A family record lists them as steps (``families.Step``). In a conversion to llama.cpp, the steps apply in order, before
names are translated. In a conversion from llama.cpp, their inverses apply in reverse order, after names are translated.
All of them are views; rows, stacks and splits of packed tensors are moved without decoding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.translate.families import Family, Step
from ingot.translate.formulas import evaluate, resolve_shape
from ingot.views.computed import compute
from ingot.views.dense import Change, change
from ingot.views.names import rename
from ingot.views.rows import permute, stack, unstack
from ingot.views.transpose import transpose
from ingot.views.units import Units, UnitSelection, interleave, split_units

RULE = "architecture.rows"
_PARAMETERS = (".weight", ".bias")
_Config = Mapping[str, Any]


def apply_steps(checkpoint: Checkpoint, config: _Config, family: Family) -> Checkpoint:
    """Return a model folder's checkpoint after the family's steps.

    Raises ``UnsupportedError`` ``architecture.rows``: a tensor with another shape than the step expects;
    ``architecture.config``.
    """
    for step in family.steps:
        checkpoint = _FORWARD[step.transform](checkpoint, step, config, family)
    return checkpoint


def undo_steps(checkpoint: Checkpoint, config: _Config, family: Family) -> Checkpoint:
    """Return the checkpoint as it was before ``apply_steps``, with the same errors."""
    for step in reversed(family.steps):
        checkpoint = _BACKWARD[step.transform](checkpoint, step, config, family)
    return checkpoint


def _matches(checkpoint: Checkpoint, modules: tuple[str, ...], family: Family) -> Iterator[tuple[str, str, str]]:
    """Yield the full name, the matching module and the parameter's suffix for each tensor of ``modules``.

    A module is named within its layer, or in full outside of layers. It may also be the name of a parameter.
    """
    layer = re.compile(rf"(?:{re.escape(family.base)})?{re.escape(family.block)}\.[0-9]{{1,6}}\.")
    for name in checkpoint:
        match = layer.match(name)
        inner = name[match.end() :] if match else name
        for ending in ("", *_PARAMETERS):
            if inner.endswith(ending) and inner.removesuffix(ending) in modules:
                yield name, inner.removesuffix(ending), ending
                break


def computed_names(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Return the names of tensors whose values a step computes."""
    modules = tuple(module for step in family.steps if step.transform == "values" for module in step.tensors)
    return [name for name, _, _ in _matches(checkpoint, modules, family)]


def _shape_error(name: str, shape: tuple[int, ...], expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected {expected}, found shape {list(shape)}; --keep-names leaves the tensors as they are",
        rule=RULE,
        where=name,
    )


def row_order(
    rows: int, step: Step, config: _Config, name: str, *, to_gguf: bool, shape: tuple[int, ...] = ()
) -> Array:
    """Return the order of rows that a step of the transform ``reorder`` applies: new row ``i`` is old row ``order[i]``.

    Raises ``UnsupportedError`` ``architecture.rows``: the number of rows does not fit the step.
    """
    sizes = resolve_shape(step.sizes, rows, config)
    if sizes is None:
        raise _shape_error(name, shape or (rows,), f"rows of {' x '.join(map(str, step.sizes))}")
    order: Array = np.arange(rows).reshape(sizes).transpose(step.axes).reshape(-1)
    return order if to_gguf else np.argsort(order)


def _reorder(checkpoint: Checkpoint, step: Step, config: _Config, family: Family, *, to_gguf: bool) -> Checkpoint:
    """Return the checkpoint with permuted rows, or with permuted columns if the step's ``axis`` is 1."""
    if step.axis:
        names = [name for name, _, _ in _matches(checkpoint, step.tensors, family)]
        checkpoint = transpose(checkpoint, {name: name for name in names})
    orders = {
        name: row_order(shape[0], step, config, name, to_gguf=to_gguf, shape=shape)
        for name, _, _ in _matches(checkpoint, step.tensors, family)
        if (shape := checkpoint[name].shape)
    }
    checkpoint = permute(checkpoint, orders) if orders else checkpoint
    return transpose(checkpoint, {name: name for name in orders}) if step.axis else checkpoint


def _transpose(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    names = {name: name for name, _, _ in _matches(checkpoint, step.tensors, family) if len(checkpoint[name].shape) > 1}
    return transpose(checkpoint, names) if names else checkpoint


def _cuts(step: Step, size: int, config: _Config) -> list[int] | None:
    """Return the sizes of the parts of a split dimension: the sizes that the step states, or equal sizes."""
    parts = step.into if step.transform == "split" else step.tensors
    if not step.sizes:
        return None if size % len(parts) else [size // len(parts)] * len(parts)
    values = [evaluate(value, config) for value in step.sizes]
    unit, remainder = divmod(size, sum(values) or 1)
    return None if remainder or not unit else [value * unit for value in values]


def _split(checkpoint: Checkpoint, step: Step, config: _Config, family: Family, *, inverse: bool = False) -> Checkpoint:
    """Return the checkpoint with each tensor split into several along an axis."""
    (fused,), parts = (step.into, step.tensors) if inverse else (step.tensors, step.into)
    selections: dict[str, dict[str, UnitSelection]] = {}
    for name, module, ending in _matches(checkpoint, (fused,), family):
        shape = checkpoint[name].shape
        axis = min(step.axis, max(len(shape) - 1, 0))
        groups = max(evaluate(step.groups, config), 1)
        size, remainder = divmod(shape[axis], groups) if shape else (0, 1)
        cuts = None if remainder else _cuts(step, size, config)
        if cuts is None:
            raise _shape_error(name, shape, f"parts for {', '.join(parts)} along dimension {axis}")
        start = name.removesuffix(module + ending)
        outer = prod(shape[:axis])
        first = 0
        selections[name] = {}
        for part, count in zip(parts, cuts, strict=True):
            new_shape = (*shape[:axis], count * groups, *shape[axis + 1 :])
            selections[name][f"{start}{part}{ending}"] = UnitSelection(
                new_shape, Units(outer * groups, size, first, count)
            )
            first += count
    return split_units(checkpoint, selections) if selections else checkpoint


def _join(checkpoint: Checkpoint, step: Step, config: _Config, family: Family, *, inverse: bool = False) -> Checkpoint:
    """Return the checkpoint with several tensors joined into one along an axis."""
    parts, (fused,) = (step.into, step.tensors) if inverse else (step.tensors, step.into)
    joined: dict[str, tuple[tuple[int, ...], Mapping[str, Units]]] = {}
    for name, module, ending in _matches(checkpoint, parts[:1], family):
        start = name.removesuffix(module + ending)
        members = [f"{start}{part}{ending}" for part in parts]
        missing = next((member for member in members if member not in checkpoint), None)
        if missing is not None:
            raise UnsupportedError(f"expected {missing} next to it", rule=RULE, where=name)
        shapes = [checkpoint[member].shape for member in members]
        axis = min(step.axis, max(len(shapes[0]) - 1, 0))
        outside = [(*shape[:axis], *shape[axis + 1 :]) for shape in shapes]
        if any(len(shape) != len(shapes[0]) for shape in shapes) or len(set(outside)) != 1 or not shapes[0]:
            raise _shape_error(name, shapes[0], f"shapes that can be joined to {fused}")
        groups = max(evaluate(step.groups, config), 1)
        if any(shape[axis] % groups for shape in shapes):
            raise _shape_error(name, shapes[0], f"{groups} groups of rows for {fused}")
        total = sum(shape[axis] for shape in shapes)
        outer = prod(shapes[0][:axis]) * groups
        units = {}
        first = 0
        for member, shape in zip(members, shapes, strict=True):
            units[member] = Units(outer, total // groups, first, shape[axis] // groups)
            first += shape[axis] // groups
        shape = shapes[0]
        joined[f"{start}{fused}{ending}"] = ((*shape[:axis], total, *shape[axis + 1 :]), units)
    return interleave(checkpoint, joined) if joined else checkpoint


def _reshape(checkpoint: Checkpoint, step: Step, family: Family, shape_of: Callable[..., Any]) -> Checkpoint:
    changes = {}
    for name, _, _ in _matches(checkpoint, step.tensors, family):
        tensor = checkpoint[name]
        shape = shape_of(name, tensor.shape)
        if shape != tensor.shape:
            changes[name] = Change(tensor.dtype, shape=shape)
    return change(checkpoint, changes) if changes else checkpoint


def _squeeze(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    """Return the checkpoint with a dimension of size 1 removed."""

    def squeezed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) <= step.axis or shape[step.axis] != 1:
            raise _shape_error(name, shape, f"size 1 of dimension {step.axis}")
        return (*shape[: step.axis], *shape[step.axis + 1 :])

    return _reshape(checkpoint, step, family, squeezed)


def _unsqueeze(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    """Return the checkpoint with a dimension of size 1 added."""
    return _reshape(checkpoint, step, family, lambda _, shape: (*shape[: step.axis], 1, *shape[step.axis :]))


def _fold(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    """Return the checkpoint with a vector reshaped to the step's shape."""

    def folded(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = resolve_shape(step.sizes, prod(shape), config)
        if sizes is None:
            raise _shape_error(name, shape, " x ".join(map(str, step.sizes)))
        return tuple(sizes)

    return _reshape(checkpoint, step, family, folded)


def _flatten(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    return _reshape(checkpoint, step, family, lambda _, shape: (prod(shape),))


def _values(checkpoint: Checkpoint, step: Step, config: _Config, family: Family, *, inverse: bool) -> Checkpoint:
    """Return the checkpoint with values replaced by a function of them, computed in f32."""
    names = {name: (step.function, inverse) for name, _, _ in _matches(checkpoint, step.tensors, family)}
    return compute(checkpoint, names) if names else checkpoint


def _stack(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    """Return the checkpoint with indexed tensors (``{}`` in the module) stacked along a new first dimension."""
    groups: dict[str, dict[int, str]] = {}
    for source, target in zip(step.tensors, step.into, strict=True):
        before, _, after = source.partition("{}")
        pattern = re.compile(
            rf"((?:{re.escape(family.base)})?{re.escape(family.block)}\.[0-9]{{1,6}}\.)"
            rf"{re.escape(before)}([0-9]{{1,6}}){re.escape(after)}(\.weight|\.bias)?"
        )
        for name in checkpoint:
            if match := pattern.fullmatch(name):
                groups.setdefault(f"{match[1]}{target}{match[3] or ''}", {})[int(match[2])] = name
    names = {}
    for new, members in groups.items():
        if sorted(members) != list(range(len(members))):
            raise UnsupportedError(f"expected each index from 0, found {sorted(members)[:8]}", rule=RULE, where=new)
        names[new] = [members[index] for index in sorted(members)]
    return stack(checkpoint, names) if names else checkpoint


def _unstack(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    names = {}
    for source, target in zip(step.tensors, step.into, strict=True):
        for name, module, ending in _matches(checkpoint, (target,), family):
            start = name.removesuffix(module + ending)
            count = checkpoint[name].shape[0] if checkpoint[name].shape else 0
            names[name] = [f"{start}{source.format(index)}{ending}" for index in range(count)]
    return unstack(checkpoint, names) if names else checkpoint


def _rename(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    new = dict(zip(step.tensors, step.into, strict=True))
    names = {
        name: name.removesuffix(module + ending) + new[module] + ending
        for name, module, ending in _matches(checkpoint, step.tensors, family)
    }
    return rename(checkpoint, names) if names else checkpoint


def _rename_back(checkpoint: Checkpoint, step: Step, config: _Config, family: Family) -> Checkpoint:
    return _rename(checkpoint, replace(step, tensors=step.into, into=step.tensors), config, family)


_Transform = Callable[[Checkpoint, Step, _Config, Family], Checkpoint]
_FORWARD: Mapping[str, _Transform] = {
    "reorder": lambda *arguments: _reorder(*arguments, to_gguf=True),
    "transpose": _transpose,
    "split": _split,
    "join": _join,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "fold": _fold,
    "flatten": _flatten,
    "values": lambda *arguments: _values(*arguments, inverse=False),
    "stack": _stack,
    "rename": _rename,
}
_BACKWARD: Mapping[str, _Transform] = {
    "reorder": lambda *arguments: _reorder(*arguments, to_gguf=False),
    "transpose": _transpose,
    "split": lambda *arguments: _join(*arguments, inverse=True),
    "join": lambda *arguments: _split(*arguments, inverse=True),
    "squeeze": _unsqueeze,
    "unsqueeze": _squeeze,
    "fold": _flatten,
    "flatten": _fold,
    "values": lambda *arguments: _values(*arguments, inverse=True),
    "stack": _unstack,
    "rename": _rename_back,
}
