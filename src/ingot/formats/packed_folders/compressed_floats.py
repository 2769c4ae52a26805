"""Layers of small floats in folders of compressed-tensors: float-quantized, nvfp4-, mxfp4-, mxfp6- and mxfp8-pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import WEIGHT, Entries, Layer
from ingot.formats.packed_folders.floats import (
    POWERS,
    SCALE_TYPES,
    block_size,
    fp4_layer,
    fp8_layer,
    grid_of,
    layout_to_write,
)
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.layouts.affine import Group, PerTensor, Row
from ingot.model.layouts.scaled_codebook import (
    DIVIDE,
    DTYPES_OF_VALUES,
    INDICES,
    SCALES,
    SECOND,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.spec import TensorSpec

DIALECT = "compressed-tensors"
PACKED = "_packed"
SCALE = "_scale"
SECOND_SCALE = "_global_scale"


_MX = ScaledCodebookLayout(4, Group(32), "f32", scales=POWERS, values="f4_e2m1fn")
_PACKS: Mapping[str, ScaledCodebookLayout] = {
    "nvfp4-pack-quantized": replace(_MX, grid=Group(16), scales="f8_e4m3fn", second=DIVIDE),
    "mxfp4-pack-quantized": _MX,
    "mxfp6-pack-quantized": replace(_MX, bits=6, values="f6_e2m3fn"),
    "mxfp8-quantized": replace(_MX, bits=8, values="f8_e4m3fn"),
}
"""The layouts that have a format in compressed-tensors, for every element type."""


class FloatGroup(NamedTuple):
    """The settings of weights in a group of ``config.json`` for layers of floats.

    ``scales`` is the name of a torch type; None if the group does not state it.
    """

    format: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    scales: str | None


def float_layer(entries: Entries, stem: str, groups: Sequence[Mapping[str, Any]], dtype: str) -> Layer:
    """Return the layer of a module with float weights; ``groups`` are the ``weights`` of groups in ``config.json``.

    Raises ``FormatError`` ``compressed-tensors.parts``, ``.dtype``, ``.shape``, ``.config``; ``UnsupportedError``
    ``compressed-tensors.format``.
    """
    name = stem + WEIGHT
    packed = name + PACKED
    scale = name + SCALE
    key = packed if packed in entries else name
    if scale not in entries:
        raise FormatError(
            f"{DIALECT}.parts", f"expected the entry {scale!r} of this weight, but it is missing", where=name
        )
    if name + "_zero_point" in entries:
        raise UnsupportedError("expected floats without zero points", rule=f"{DIALECT}.format", where=name)
    keys = {INDICES: key, SCALES: scale}
    bits = {group.get("num_bits", 8) for group in groups}
    if key == packed and name + SECOND_SCALE in entries:
        return fp4_layer(entries, {**keys, SECOND: name + SECOND_SCALE}, DIALECT, dtype, DIVIDE, name, 16)
    if key == packed:
        shape, blocks = entries[key].shape, entries[scale].shape
        six = 6 in bits and len(shape) > 1 and blocks == (*shape[:-1], shape[-1] * 4 // 3 // 32)
        return _six_bits(entries, keys, dtype, name) if six else _four_bits(entries, keys, dtype, name)
    shape, scales = entries[key].shape, entries[scale]
    sizes = {size for group in groups if isinstance(size := group.get("group_size"), int) and 0 < size < 2**31}
    for size in sorted(sizes if len(shape) > 1 else ()):
        if shape[-1] % size == 0 and scales.shape == (*shape[:-1], shape[-1] // size):
            return _groups(entries, keys, dtype, size)
    structures = (group["block_structure"] for group in groups if group.get("block_structure"))
    sizes_of_blocks = [block_size(block, DIALECT) for block in structures] if len(shape) > 1 else []
    fits = (
        size_of_block for size_of_block in sizes_of_blocks if grid_of(shape, scales.shape, size_of_block) is not None
    )
    return fp8_layer(entries, key, scale, DIALECT, dtype, next(fits, next(iter(sizes_of_blocks), None)))


def _four_bits(entries: Entries, keys: Mapping[str, str], dtype: str, name: str) -> Layer:
    group = 16 if entries[keys[SCALES]].dtype == "f8_e4m3fn" else 32
    return fp4_layer(entries, keys, DIALECT, dtype, None, name, group)


def _groups(entries: Entries, keys: Mapping[str, str], dtype: str, group: int) -> Layer:
    key = keys[INDICES]
    scales = entries[keys[SCALES]]
    scale_type = POWERS if scales.dtype == "u8" else scales.dtype
    if scale_type not in SCALE_TYPES:
        raise FormatError(
            f"{DIALECT}.dtype", f"expected scales {', '.join(SCALE_TYPES)}, found {scale_type}", where=key
        )
    layout = ScaledCodebookLayout(8, Group(group), dtype, scales=scale_type, values=entries[key].dtype)
    return Layer(key, entries[key].shape, layout, keys)


def _six_bits(entries: Entries, keys: Mapping[str, str], dtype: str, name: str) -> Layer:
    """Return a layer of E2M3 floats, packed four in three bytes, the first in the low bits."""
    weight = entries[keys[INDICES]]
    scales = entries[keys[SCALES]]
    if weight.dtype != "u8" or scales.dtype not in ("u8", POWERS):
        raise FormatError(f"{DIALECT}.dtype", f"expected u8, found {weight.dtype} and {scales.dtype}", where=name)
    cols = weight.shape[-1] * 4 // 3 if len(weight.shape) > 1 else 0
    shape = (*weight.shape[:-1], cols)
    if not cols or weight.shape[-1] % 3 or cols % 32 or scales.shape != (*shape[:-1], cols // 32):
        raise FormatError(
            f"{DIALECT}.shape",
            f"expected four numbers in 3 bytes and a scale for 32 columns, found {list(weight.shape)} and "
            f"{list(scales.shape)}",
            where=name,
        )
    layout = ScaledCodebookLayout(6, Group(32), dtype, scales=POWERS, values="f6_e2m3fn")
    return Layer(name, shape, layout, keys)


def why_floats_unsupported(spec: TensorSpec) -> str | None:
    """Return why a scaled codebook cannot be a layer of floats; None if it can."""
    layout = layout_to_write(spec)
    if isinstance(layout, str):
        return layout
    if format_of(layout) is None:
        return (
            f"its layers of floats are {', '.join(_PACKS)} and float-quantized; this tensor has another table or other "
            "scales"
        )
    if isinstance(layout.grid, Group) and (spec.shape[1] % 32 or spec.shape[1] % layout.grid.columns):
        return (
            f"its groups divide the columns, which are a multiple of 32, found {layout.grid.columns} of {spec.shape[1]}"
        )
    return None


def float_entries(spec: TensorSpec) -> list[FileEntry]:
    """Return the entries of a supported layer of floats."""
    layout, (rows, cols) = ScaledCodebookLayout.from_tensor(spec), spec.shape
    sizes = {part.role: part.length or 0 for part in spec.parts}
    packed = layout.bits < 8
    codes = (rows, cols * layout.bits // 8)
    match layout.grid:
        case Tiles(tall, wide):
            grid: tuple[int, ...] = (-(-rows // tall), -(-cols // wide))
        case Row() | Group():
            grid = (rows, layout.groups(cols))
        case _:
            grid = (1,)
    scale_dtype = "u8" if layout.scales == POWERS else layout.scales
    weight = ("u8", spec.name + PACKED) if packed else ("f8_e4m3fn", spec.name)
    entries = [
        FileEntry(INDICES, weight[1], weight[0], codes, sizes[INDICES]),
        FileEntry(SCALES, spec.name + SCALE, scale_dtype, grid, sizes[SCALES]),
    ]
    return [*entries, FileEntry(SECOND, spec.name + SECOND_SCALE, "f32", (1,), 4)] if layout.second else entries


def float_group(layout: ScaledCodebookLayout) -> FloatGroup:
    """Return the group settings of layers of floats with this layout."""
    grid = layout.grid
    format = format_of(layout)
    assert format is not None
    strategy = {PerTensor: "tensor", Row: "channel", Group: "group", Tiles: "block"}[type(grid)]
    return FloatGroup(
        format=format,
        bits=layout.bits,
        strategy="tensor_group" if layout.second else strategy,
        group=grid.columns if isinstance(grid, Group) else None,
        block=(grid.rows, grid.columns) if isinstance(grid, Tiles) else None,
        scales={POWERS: "torch.uint8", "f8_e4m3fn": "torch.float8_e4m3fn"}.get(layout.scales),
    )


def format_of(layout: ScaledCodebookLayout) -> str | None:
    """Return the name of compressed-tensors' format for layers with this layout; None if it has no such format."""
    for name, layout_of_format in _PACKS.items():
        if layout == replace(layout_of_format, dtype=layout.dtype):
            return name
    float_quantized = ScaledCodebookLayout(8, layout.grid, layout.dtype, scales=layout.scales, values="f8_e4m3fn")
    has_known_grid = isinstance(layout.grid, PerTensor | Row | Group | Tiles)
    return (
        "float-quantized"
        if layout == float_quantized and layout.scales in DTYPES_OF_VALUES and has_known_grid
        else None
    )
