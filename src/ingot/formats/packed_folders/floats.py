"""Helpers for formats with small floats: grids of scales, and layers of FP8 and FP4."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.packed_folders.base import WEIGHT, Config, Entries, Layer, tied_head
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import PER_TENSOR, ROW, Group
from ingot.model.layouts.base import Shape
from ingot.model.layouts.scaled_codebook import (
    DTYPES_OF_VALUES,
    INDICES,
    SCALES,
    SECOND,
    Grid,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor

FP8 = ("f8_e4m3fn", "f8_e5m2")
FP4 = "f4_e2m1fn"
POWERS = "f8_e8m0fnu"
SCALE_TYPES = (*DTYPES_OF_VALUES, POWERS)


def config_dtype(config: Config) -> str:
    """Return the element type of weights that ``config.json`` declares; bf16 if it declares none."""
    for holder in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            declared = holder.get(key) if isinstance(holder, Mapping) else None
            if isinstance(declared, str):
                name = dtype_from_torch(declared)
                if name is not None:
                    return name
    return "bf16"


def dtype_from_torch(declared: str) -> str | None:
    """Return the element type for the name of a torch type; None for an unknown name."""
    try:
        name = resolve_dtype(declared.removeprefix("torch.")).name
    except UnsupportedError:
        return None
    return name if name in DTYPES_OF_VALUES else None


def grid_of(shape: Shape, scales: Shape, block: tuple[int, int] | None) -> Grid | None:
    """Return the grid of scales with shape ``scales`` for a tensor with ``shape``; None if no grid is possible.

    Possible grids have one scale for the tensor, per row, per block of shape ``block``, or per matrix of a stack.
    """
    if prod(scales) == 1 and len(shape) < 3:
        return PER_TENSOR
    rows, cols = shape[-2:]
    if scales in (shape[:-1], (*shape[:-1], 1)) and (block is None or block[1] >= cols):
        return ROW
    if block is not None and scales == (*shape[:-2], -(-rows // block[0]), -(-cols // block[1])):
        return Tiles(*block)
    if scales in (shape[:-2], (*shape[:-2], 1, 1)):  # a scale per matrix of a stack
        return Tiles(rows, cols)
    return None


def fp8_layer(
    entries: Entries, key: str, scale: str, dialect: str, dtype: str, block: tuple[int, int] | None = None
) -> Layer:
    """Return the layer of an FP8 matrix, or of a stack of them, which is multiplied by its scales.

    Raises ``FormatError`` ``<dialect>.dtype``, ``<dialect>.shape``.
    """
    weight = entries[key]
    scales = entries[scale]
    scale_type = POWERS if scales.dtype == "u8" else scales.dtype
    if scale_type not in SCALE_TYPES:
        raise FormatError(
            f"{dialect}.dtype", f"expected scales {', '.join(SCALE_TYPES)}, found {scale_type}", where=scale
        )
    grid = grid_of(weight.shape, scales.shape, block) if len(weight.shape) > 1 else None
    if grid is None:
        raise FormatError(
            f"{dialect}.shape",
            f"expected scales for the tensor, each row or blocks of {list(block or ())} of {list(weight.shape)}, found "
            f"shape {list(scales.shape)}",
            where=scale,
        )
    layout = ScaledCodebookLayout(8, grid, dtype, scales=scale_type, values=weight.dtype)
    return Layer(key, weight.shape, layout, {INDICES: key, SCALES: scale})


def fp4_layer(
    entries: Entries, keys: Mapping[str, str], dialect: str, dtype: str, second: str | None, name: str, group: int
) -> Layer:
    """Return the layer of E2M1 floats, two per byte, low bits first; ``group`` floats share a scale.

    ``keys`` are entries by role. Raises ``FormatError`` ``<dialect>.dtype``, ``<dialect>.shape``.
    """
    weight = entries[keys[INDICES]]
    scales = entries[keys[SCALES]]
    scale_type = "f8_e4m3fn" if group == 16 else POWERS
    if weight.dtype not in ("u8", "i8") or scales.dtype not in (scale_type, *(("u8",) if scale_type == POWERS else ())):
        raise FormatError(
            f"{dialect}.dtype",
            f"expected u8 and scales of {scale_type}, found {weight.dtype} and {scales.dtype}",
            where=name,
        )
    shape = (*weight.shape[:-1], weight.shape[-1] * 2) if weight.shape else ()
    if len(shape) < 2 or shape[-1] % group or scales.shape != (*shape[:-1], shape[-1] // group):
        raise FormatError(
            f"{dialect}.shape",
            f"expected two numbers in a byte and a scale for {group} columns, found shapes {list(weight.shape)} and "
            f"{list(scales.shape)}",
            where=name,
        )
    if second and (entries[keys[SECOND]].dtype != "f32" or entries[keys[SECOND]].size != 1):
        raise FormatError(
            f"{dialect}.shape",
            f"expected one second scale in f32, found {_describe(entries[keys[SECOND]])}",
            where=name,
        )
    layout = ScaledCodebookLayout(4, Group(group), dtype, scales=scale_type, values=FP4, second=second)
    return Layer(name, shape, layout, keys)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def existing_entries(entries: Entries, stem: str, suffixes: Collection[str]) -> list[str]:
    """Return the existing entries among ``stem + suffix``."""
    return [stem + suffix for suffix in suffixes if stem + suffix in entries]


def block_size(declared: Any, dialect: str) -> tuple[int, int] | None:
    """Return rows and columns of a block, from the value in ``config.json``.

    Raises ``FormatError`` ``<dialect>.config``.
    """
    if declared is None:
        return None
    if (
        not isinstance(declared, list | tuple)
        or len(declared) != 2
        or not all(type(size) is int and 1 <= size <= 2**31 for size in declared)
    ):
        raise FormatError(
            f"{dialect}.config", f"expected a block of two positive numbers, found {str(declared)[:80]!r}"
        )
    return declared[0], declared[1]


def layout_to_write(spec: TensorSpec) -> ScaledCodebookLayout | str:
    """Return the layout of a tensor, or a text that states why its parts cannot be entries of a file."""
    try:
        layout = ScaledCodebookLayout.from_tensor(spec)
    except CodecError as error:
        return error.message
    parts = [replace(part, type=None) for part in spec.parts]
    if parts != [replace(part, type=None) for part in layout.part_specs(spec.shape)]:
        return "its packed layers have uncompressed parts"
    return layout


def dense_module_names(artifact: Artifact, codecs: Collection[str]) -> list[str]:
    """Return the modules whose matrices are dense, and a tied head."""
    dense = [
        spec.name.removesuffix(WEIGHT)
        for spec in artifact.tensors
        if spec.codec not in codecs and len(spec.shape) == 2 and spec.name.endswith(WEIGHT)
    ]
    return [*dense, *tied_head(artifact)]
