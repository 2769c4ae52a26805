"""The choice that stores new values of a tensor in the same way as its old values."""

from __future__ import annotations

from typing import Any

from ingot.codecs.blocks.codec import LEVELS
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import ROWS_MSB, AffineLayout, Constant, Group, NoZero, PerTensor, Points, Row
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.layouts.scaled_codebook import Run, ScaledCodebookLayout, Tiles
from ingot.model.tensor import Tensor
from ingot.recipes.choice import Choice

RULE = "convert.like-stored"


def choice_like(tensor: Tensor) -> Choice:
    """Return the choice with the codec, bits and group size of a tensor; scales are fitted to the new values.

    Raises ``UnsupportedError`` ``convert.like-stored``: Ingot has no encoder for this storage.
    """
    if tensor.codec == DenseLayout.codec:
        return Choice(DenseLayout.codec, {"dtype": tensor.dtype})
    layout = tensor.layout
    options: dict[str, Any] | None = None
    codec = tensor.codec
    if isinstance(layout, AffineLayout):
        options = _affine(layout)
    elif isinstance(layout, PackedIntLayout):
        codec = AffineLayout.codec
        zero = {"symmetric": False} if isinstance(layout.zero, Points) else {"zero_point": layout.zero.point}
        options = {"bits": layout.bits, "group": layout.group or "row", "scales": layout.scales, **zero}
    elif isinstance(layout, GgmlBlocksLayout) and layout.type in LEVELS:
        options = {"type": layout.type}
    elif isinstance(layout, ScaledCodebookLayout):
        options = _scaled(layout)
    if options is None:
        raise UnsupportedError(
            f"merged values cannot be stored as {tensor.codec} like the base's; choose another storage with --recipe",
            rule=RULE,
            where=tensor.name,
        )
    return Choice(codec, options)


def _affine(layout: AffineLayout) -> dict[str, Any] | None:
    groups = {Row: "row", PerTensor: "tensor"}
    group = layout.grid.columns if isinstance(layout.grid, Group) else groups.get(type(layout.grid))
    is_sign = layout.bits == 1 and isinstance(layout.zero, NoZero | Constant)
    if group is None or is_sign:
        return None
    options: dict[str, Any] = {"bits": layout.bits, "group": group, "scales": layout.scales}
    if layout.packing == ROWS_MSB:
        options["bit_order"] = "msb"
    if isinstance(layout.zero, Constant):
        return {**options, "zero_point": layout.zero.point}
    if isinstance(layout.zero, NoZero):
        return options if layout.signed else None
    zeros = {} if isinstance(layout.zero, Points) else {"zero_kind": "offset"}
    return {**options, "symmetric": False, "signed": layout.signed, **zeros}


def _scaled(layout: ScaledCodebookLayout) -> dict[str, Any] | None:
    if layout.values is None or layout.factor is not None:
        return None
    grid = layout.grid
    options: dict[str, Any] = {"table": layout.values, "order": layout.order, "transposed": layout.transposed}
    options["scales"] = "f32" if layout.nested is not None else layout.scales
    if layout.second is not None:
        options["second"] = layout.second
    if isinstance(grid, Run):
        return {**options, "group": grid.elements, "flat": True}
    if isinstance(grid, Tiles):
        return {**options, "group": [grid.rows, grid.columns]}
    group = grid.columns if isinstance(grid, Group) else "row" if isinstance(grid, Row) else "tensor"
    return {**options, "group": group}
