"""Quantized layers of MLX folders: what ``config.json`` says of them, and the tensors they are (``spec/mlx.md``)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.core.config import CONFIG, parse_config, stored_config
from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.safetensors.pieces import BIASES, SCALES, WEIGHT
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import OFFSETS, ROLES, ROWS_LSB, AffineLayout, Group
from ingot.model.layouts.dense import DATA
from ingot.model.lazy import Lazy
from ingot.model.part import Part
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor

KEYS = ("quantization", "quantization_config")
MODE = "affine"
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
SCALE_DTYPES = ("f16", "bf16", "f32")


@dataclass(frozen=True, slots=True)
class Grid:
    """Bits of a code and columns that share a scale and an offset."""

    bits: int
    group: int

    def layout(self, dtype: str) -> AffineLayout:
        """Return the layout of a packed layer whose scales, offsets and values are of ``dtype``."""
        return AffineLayout(self.bits, Group(self.group), ROWS_LSB, False, OFFSETS, dtype, dtype)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What ``config.json`` says: the usual grid, and layers (module paths) that differ; None for one that is dense."""

    usual: Grid
    layers: Mapping[str, Grid | None]

    def of(self, layer: str) -> Grid | None:
        """Return how a layer is packed."""
        return self.layers.get(layer, self.usual)


def read_config(store: Store, names: Sequence[str]) -> dict[str, Any]:
    """Return the folder's ``config.json``; empty where there is none.

    Raises ``FormatError`` ``mlx.config``.
    """
    if CONFIG not in names:
        return {}
    return stored_config(store, "mlx.config")


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of an MLX folder with packed layers."""
    stated, other = config.get("quantization"), config.get("quantization_config")
    if isinstance(other, dict) and other.get("quant_method"):
        return False  # what another program packed
    return isinstance(stated, dict) and "bits" in stated and "group_size" in stated


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Read ``quantization``; None where there is none.

    Raises
    ------
    FormatError
        ``mlx.config``: a value of the wrong type, bits or a group that MLX does not have.
    UnsupportedError
        ``mlx.mode``: other numbers than integers with scales and offsets (``mxfp4``, ``nvfp4``, ...).
    """
    if not is_quantized(config):
        return None
    stated = config["quantization"]
    layers: dict[str, Grid | None] = {}
    for path, value in stated.items():
        if isinstance(value, dict):
            layers[path] = _stated_grid({"bits": stated["bits"], "group_size": stated["group_size"], **value}, path)
        elif value is False:
            layers[path] = None
    return Quantization(_stated_grid(stated, "quantization"), layers)


def _stated_grid(stated: Mapping[str, Any], where: str) -> Grid:
    mode, bits, group = stated.get("mode", MODE), stated["bits"], stated["group_size"]
    where = f"{CONFIG}: {where[:200]}"
    if mode != MODE:
        raise UnsupportedError(
            f"expected mode affine (integers with scales and biases), found {str(mode)[:80]!r}; dequantize it with "
            "mlx_lm.convert -d first",
            rule="mlx.mode",
            where=where,
        )
    if type(bits) is not int or bits not in BITS or type(group) is not int or group not in GROUPS:
        raise FormatError(
            "mlx.config",
            f"expected bits {', '.join(map(str, BITS))} and group_size {', '.join(map(str, GROUPS))}, found "
            f"{str(bits)[:40]} and {str(group)[:40]}",
            where=where,
        )
    return Grid(bits, group)


def tensors_of(entries: Mapping[str, Tensor], quantization: Quantization | None) -> Lazy[Tensor]:
    """Return the tensors of the files, three entries taken together where a layer is packed."""
    layers: dict[str, Grid] = {}
    taken: set[str] = set()
    for name in entries:
        stem = name.removesuffix(WEIGHT)
        if quantization is None or not name.endswith(WEIGHT) or entries[name].dtype != "u32":
            continue
        grid = quantization.of(stem)
        if grid is not None:
            _check(entries, name, stem, grid)
            layers[name] = grid
            taken |= {stem + SCALES, stem + BIASES}

    def make(name: str) -> Tensor:
        return _packed_layer(entries, name, layers[name]) if name in layers else entries[name]

    return Lazy(dict.fromkeys(name for name in entries if name not in taken), make)


def _packed_layer(entries: Mapping[str, Tensor], name: str, grid: Grid) -> Tensor:
    stem = name.removesuffix(WEIGHT)
    words, scales, biases = (entries[stem + suffix] for suffix in (WEIGHT, SCALES, BIASES))
    codes = words.parts[DATA]
    packed = Part("u8", codes.length, codes.source, codes.offset, where=codes.where)
    parts = dict(zip(ROLES, (packed, scales.parts[DATA], biases.parts[DATA]), strict=True))
    shape = (*words.shape[:-1], words.shape[-1] * 32 // grid.bits)
    layout = grid.layout(scales.dtype)
    return Tensor(name, shape, layout.dtype, layout.codec, parts, layout.attributes())


def _check(entries: Mapping[str, Tensor], name: str, stem: str, grid: Grid) -> None:
    for other in (stem + SCALES, stem + BIASES):
        if other not in entries:
            raise FormatError("mlx.parts", f"expected {other!r} beside the packed weight, found none", where=name)
    shape = entries[name].shape
    scales, biases = entries[stem + SCALES], entries[stem + BIASES]
    if scales.dtype not in SCALE_DTYPES or biases.dtype != scales.dtype:
        raise FormatError(
            "mlx.dtype",
            f"expected scales and biases of one type, {', '.join(SCALE_DTYPES)}; found {scales.dtype} and "
            f"{biases.dtype}",
            where=name,
        )
    cols = shape[-1] * 32 // grid.bits if shape else 0
    wanted = (*shape[:-1], cols // grid.group)
    fits = len(shape) > 1 and shape[-1] * 32 == cols * grid.bits and cols % grid.group == 0
    if not fits or scales.shape != wanted or biases.shape != wanted:
        raise FormatError(
            "mlx.shape",
            f"expected words, scales and biases of {grid.bits} bits in groups of {grid.group}, as config.json says, "
            f"found shapes {list(shape)}, {list(scales.shape)}, {list(biases.shape)}",
            where=name,
        )


def refusal(spec: TensorSpec) -> str | None:
    """Why a quantized tensor cannot be a packed layer of MLX; None if it can."""
    try:
        layout = AffineLayout.of(spec)
    except CodecError as error:
        return error.message
    cols = spec.shape[-1] if spec.shape else 0
    if not spec.name.endswith(WEIGHT) or len(spec.shape) < 2:
        return f"its packed layers are matrices called X{WEIGHT}, found shape {list(spec.shape)}"
    if layout.bits not in BITS or layout.group_size not in GROUPS or cols % layout.group_size:
        return (
            f"its packed layers have {', '.join(map(str, BITS))} bits in groups of {', '.join(map(str, GROUPS))} that "
            f"divide the columns, found {layout.bits} bits in groups of {layout.group_size} of {cols} columns"
        )
    wanted = Grid(layout.bits, layout.group_size).layout(spec.dtype)
    if layout != replace(wanted, scales=layout.scales) or layout.scales not in SCALE_DTYPES:
        return "its packed layers are unsigned codes with float offsets (zero_kind offset, packing rows_lsb)"
    parts = layout.part_specs(spec.shape)
    if [replace(part, type=None if part.type == part.dtype else part.type) for part in spec.parts] != list(parts):
        return f"its packed layers have the uncompressed parts {[part.role for part in parts]}, found others"
    return None


def config_of(artifact: Artifact) -> bytes:
    """Return the ``config.json`` of an artifact: its own, with the keys that tell how tensors are packed.

    The same bytes where that is no change. JSON as transformers and mlx_lm read it: NaN and Infinity are kept.

    Raises ``FormatError`` ``mlx.config``.
    """
    keys = _packing_keys(artifact.tensors)
    if artifact.config is None:
        return json.dumps(keys, indent=4).encode() if keys else b"{}"
    config = parse_config(artifact.config, "mlx.config", CONFIG)
    merged = {**_unpacked(config), **keys}
    return artifact.config if merged == config else (json.dumps(merged, indent=2) + "\n").encode()


def _unpacked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of packing; configs within it likewise."""
    return {
        key: _unpacked(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in KEYS
    }


def _packing_keys(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return the keys as mlx_lm writes them: the most frequent grid is the usual one; layers of another are named."""
    layers = {
        spec.name.removesuffix(WEIGHT): _grid_of(AffineLayout.of(spec))
        for spec in specs
        if spec.codec == AffineLayout.codec
    }
    if not layers:
        return {}
    usual = Counter(layers.values()).most_common(1)[0][0]
    found: dict[str, Any] = _stated(usual)
    found.update({layer: _stated(grid) for layer, grid in sorted(layers.items()) if grid != usual})
    return dict.fromkeys(KEYS, found)


def _grid_of(layout: AffineLayout) -> Grid:
    return Grid(layout.bits, layout.group_size or 0)


def _stated(grid: Grid) -> dict[str, Any]:
    return {"group_size": grid.group, "bits": grid.bits, "mode": MODE}
