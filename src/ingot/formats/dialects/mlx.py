"""Folders as ``mlx_lm`` opens them: safetensors whose packed layers ``config.json`` describes (``spec/mlx.md``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.core.config import CONFIG
from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.dialects.base import WEIGHT, Config, Dialect, Entries, Layer, taken_together
from ingot.formats.safetensors.pieces import Piece
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import OFFSETS, ROLES, ROWS_LSB, AffineLayout, Group
from ingot.model.spec import TensorSpec

SCALES, BIASES = ".scales", ".biases"
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


class MlxFormat(Dialect):
    """Dense tensors and packed layers in one file or shards, described by the folder's ``config.json``."""

    name = "mlx"
    summary = "a folder for mlx_lm: dense tensors, and layers of 2 to 8 bits packed as MLX computes with them"
    config_keys = KEYS
    codecs = (AffineLayout.codec,)
    one_head = True

    def claims_config(self, config: Config) -> bool:
        """Whether ``quantization`` is that of an MLX folder with packed layers."""
        stated, other = config.get("quantization"), config.get("quantization_config")
        if isinstance(other, dict) and other.get("quant_method"):
            return False  # what another program packed
        return isinstance(stated, dict) and "bits" in stated and "group_size" in stated

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Three entries are a layer.

        Raises ``FormatError`` ``mlx.config``, ``mlx.parts``, ``mlx.dtype``, ``mlx.shape`` and ``UnsupportedError``
        ``mlx.mode``.
        """
        return list(_layers(entries, quantization_of(config)))

    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a quantized tensor cannot be a packed layer of MLX; None if it can."""
        return refusal(spec)

    def layer_pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """``X.weight`` as words of 32 bits, ``X.scales``, ``X.biases``."""
        stem, lead, cols = spec.name.removesuffix(WEIGHT), spec.shape[:-1], spec.shape[-1]
        layout = AffineLayout.of(spec)
        packed, scales, zeros = layout.part_specs(spec.shape)
        groups = (*lead, *layout.scale_shape(1, cols)[1:])
        words = (*lead, layout.row_bytes(cols) // 4)
        return [
            Piece(packed.role, spec.name, "u32", words, packed.length or 0),
            Piece(scales.role, stem + SCALES, scales.dtype, groups, scales.length or 0),
            Piece(zeros.role, stem + BIASES, zeros.dtype, groups, zeros.length or 0),
        ]

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return the keys as mlx_lm writes them: the most frequent grid is the usual one; layers of another are
        named."""
        layers = {
            spec.name.removesuffix(WEIGHT): _grid_of(AffineLayout.of(spec))
            for spec in artifact.tensors
            if spec.codec == AffineLayout.codec
        }
        if not layers:
            return {}
        usual = Counter(layers.values()).most_common(1)[0][0]
        found: dict[str, Any] = _stated(usual)
        found.update({layer: _stated(grid) for layer, grid in sorted(layers.items()) if grid != usual})
        return dict.fromkeys(KEYS, found)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Text, as safetensors has it; ``format`` says ``mlx``, which MLX's own loaders look at."""
        return {**super().metadata(values), "format": "mlx"}


def quantization_of(config: Config) -> Quantization:
    """Read ``quantization``.

    Raises
    ------
    FormatError
        ``mlx.config``: a value of the wrong type, bits or a group that MLX does not have.
    UnsupportedError
        ``mlx.mode``: other numbers than integers with scales and offsets (``mxfp4``, ``nvfp4``, ...).
    """
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


def _layers(entries: Entries, quantization: Quantization) -> Iterator[Layer]:
    for name in entries:
        if not name.endswith(WEIGHT) or entries[name].dtype != "u32":
            continue
        stem = name.removesuffix(WEIGHT)
        grid = quantization.of(stem)
        if grid is None:
            continue
        _check(entries, name, stem, grid)
        shape = entries[name].shape
        parts = dict(zip(ROLES, (name, stem + SCALES, stem + BIASES), strict=True))
        layout = grid.layout(entries[stem + SCALES].dtype)
        yield Layer(name, (*shape[:-1], shape[-1] * 32 // grid.bits), layout, parts)


def _check(entries: Entries, name: str, stem: str, grid: Grid) -> None:
    scales, biases = taken_together(entries, stem, (SCALES, BIASES), "mlx.parts").values()
    shape = entries[name].shape
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


def _grid_of(layout: AffineLayout) -> Grid:
    return Grid(layout.bits, layout.group_size or 0)


def _stated(grid: Grid) -> dict[str, Any]:
    return {"group_size": grid.group, "bits": grid.bits, "mode": MODE}
