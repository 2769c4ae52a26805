"""Splitting of matrices that contain gate and up of all experts of a layer, as published for Qwen3-VL and Qwen3.5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.translate.config_numbers import integer
from ingot.translate.families import Family
from ingot.views.names import rename
from ingot.views.transpose import transpose
from ingot.views.units import Units, UnitSelection, split_units

RULE = "architecture.rows"
_GATE_UP = "gate_up_proj"
_DOWN = "down_proj"
_PARTS = ("gate_proj", "up_proj")


def split_fused_experts(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> Checkpoint:
    """Return the checkpoint with ``gate_up_proj`` [experts, 2 * outputs, inputs] split into ``gate_proj`` and
    ``up_proj``.

    Matrices that are stored transposed, [experts, inputs, 2 * outputs], are transposed. Families whose columns
    alternate between gate and up (``Family.interleaved``) are unchanged.

    Raises ``UnsupportedError`` ``architecture.rows``: tensors of other shapes, or a missing tensor;
    ``architecture.config``.
    """
    experts = family.experts
    if experts is None or not {*_PARTS, _DOWN} <= set(experts.modules):
        return checkpoint
    layer = re.compile(rf"{re.escape(family.block)}\.[0-9]{{1,6}}\.{re.escape(experts.prefix)}\.")
    fused: dict[str, dict[str, str]] = {}
    for name in checkpoint:
        match = layer.match(name)
        module = name[match.end() :].removesuffix(".weight") if match else ""
        if match is not None and module in (_GATE_UP, _DOWN):
            fused.setdefault(match[0], {})[module] = name
    for start, names in fused.items():
        absent = next((module for module in (_GATE_UP, _DOWN) if module not in names), None)
        if absent is not None:
            raise UnsupportedError(f"expected {start}{absent} next to it", rule=RULE, where=next(iter(names.values())))
    transposed = {
        name: name for names in fused.values() if _is_transposed(checkpoint, names, config) for name in names.values()
    }
    view = transpose(checkpoint, transposed) if transposed else checkpoint
    down = {names[_DOWN]: f"{start}{_DOWN}.weight" for start, names in fused.items()}
    slices = {
        names[_GATE_UP]: _halves(f"{start}{{}}.weight", view[names[_GATE_UP]].shape) for start, names in fused.items()
    }
    view = rename(view, down) if down else view
    return split_units(view, slices) if slices else view


def _is_transposed(checkpoint: Checkpoint, names: Mapping[str, str], config: Mapping[str, Any]) -> bool:
    """Return whether a layer's matrices are stored as [inputs, outputs].

    The matrix that is not square decides; at most one of the two is square.
    """
    hidden = integer(config, "hidden_size")
    inner = integer(config, "moe_intermediate_size")
    shapes = [checkpoint[names[module]].shape for module in (_GATE_UP, _DOWN)]
    orders = [
        [(2 * inner, hidden), (hidden, inner)],
        [(hidden, 2 * inner), (inner, hidden)],
    ]
    for is_transposed, order in enumerate(orders):
        if [shape[1:] for shape in shapes] == order and shapes[0][:1] == shapes[1][:1]:
            return bool(is_transposed)
    raise UnsupportedError(
        f"expected experts [experts, {2 * inner}, {hidden}] and [experts, {hidden}, {inner}], found "
        f"{[list(shape) for shape in shapes]}; --keep-names leaves the tensors as they are",
        rule=RULE,
        where=names[_GATE_UP],
    )


def _halves(template: str, shape: tuple[int, ...]) -> dict[str, UnitSelection]:
    count, rows, cols = shape
    half = rows // 2
    return {
        template.format(part): UnitSelection((count, half, cols), Units(count, rows, index * half, half))
        for index, part in enumerate(_PARTS)
    }
