"""Folders for ``mlx_lm``: safetensors files, and a ``config.json`` that describes packed layers (``spec/mlx.md``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.packed_folders.base import (
    WEIGHT,
    Config,
    Entries,
    Layer,
    WritablePackedFolderFormat,
    require_entries,
)
from ingot.formats.packed_folders.config_keys import Key, location_of, require_known_keys, used
from ingot.formats.packed_folders.floats import config_dtype, layout_to_write
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import OFFSETS, ROLES, ROWS_LSB, AffineLayout, Group
from ingot.model.layouts.scaled_codebook import INDICES, ScaledCodebookLayout
from ingot.model.layouts.scaled_codebook import SCALES as FLOAT_SCALES
from ingot.model.spec import TensorSpec
from ingot.naming.config import CONFIG

SCALES = ".scales"
BIASES = ".biases"
KEYS = ("quantization", "quantization_config")
AUTOROUND_METHODS = ("auto-round", "intel/auto-round", "auto_round")
AUTOROUND_PACKINGS = ("mlx", "auto_round:mlx")
"""Values of ``quant_method`` and of ``packing_format`` in folders that AutoRound wrote in MLX's layout."""
_GRID_KEYS: Mapping[str, Key] = {
    "bits": used("bits of a code"),
    "group_size": used("columns of a group"),
    "mode": used("integers with an offset, or floats with fewer bits"),
}
MODE = "affine"
FLOATS = {
    "mxfp4": (4, 32, "f4_e2m1fn", "f8_e8m0fnu"),
    "mxfp8": (8, 32, "f8_e4m3fn", "f8_e8m0fnu"),
    "nvfp4": (4, 16, "f4_e2m1fn", "f8_e4m3fn"),
}
"""Modes of small floats: bits, columns of a group, type of the codes, type of the scales."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
SCALE_DTYPES = ("f16", "bf16", "f32")


@dataclass(frozen=True, slots=True)
class Grid:
    """The packing of a layer: bits per code, columns per group, and mode.

    Mode ``affine`` has integers with an offset; other modes have small floats.
    """

    bits: int
    group: int
    mode: str = MODE

    def layout(self, dtype: str) -> AffineLayout | ScaledCodebookLayout:
        """Return the layout of a packed layer whose values have type ``dtype``.

        For integers, ``dtype`` is also the type of scales and offsets.
        """
        if self.mode != MODE:
            bits, group, values, scales = FLOATS[self.mode]
            return ScaledCodebookLayout(bits, Group(group), dtype, scales=scales, values=values)
        return AffineLayout(self.bits, Group(self.group), ROWS_LSB, False, OFFSETS, dtype, dtype)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The packing that ``config.json`` declares: the usual grid, and other grids by the module paths of their layers.

    The grid of a dense layer is None.
    """

    usual: Grid
    layers: Mapping[str, Grid | None]

    def grid_of(self, layer: str) -> Grid | None:
        """Return the grid of a layer; None if it is dense."""
        return self.layers.get(layer, self.usual)


class MlxFormat(WritablePackedFolderFormat):
    """A folder of MLX: dense tensors and packed layers in one file or shards, described by its ``config.json``."""

    name = "mlx"
    summary = "a folder for mlx_lm: dense tensors, and layers of 2 to 8 bits and small floats as MLX packs them"
    traits = replace(
        WritablePackedFolderFormat.traits,
        config_keys=KEYS,
        packed_codecs=(AffineLayout.codec, ScaledCodebookLayout.codec),
        group_sizes=GROUPS[::-1],
        one_head=True,
        rounds_steps=True,
    )
    companions = (SCALES, BIASES)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quantization`` describes an MLX folder with packed layers."""
        quantization = config.get("quantization")
        hf_config = config.get("quantization_config")
        if isinstance(hf_config, dict) and hf_config.get("quant_method") and not _is_autoround(hf_config):
            return False  # another program packed it
        return isinstance(quantization, dict) and "bits" in quantization and "group_size" in quantization

    def check_keys(self, config: Config) -> None:
        """Raise ``UnsupportedError`` ``interop.config-key`` for unknown keys.

        Objects and bools are settings of layers.
        """
        quantization = config["quantization"]
        paths = {
            path: used("a layer", _GRID_KEYS) for path, value in quantization.items() if isinstance(value, bool | dict)
        }
        require_known_keys(quantization, {**paths, **_GRID_KEYS}, self.name, location_of("quantization"))

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the layers; a layer of integers has three entries, one of small floats has two.

        Raises ``FormatError`` ``mlx.config``, ``mlx.parts``, ``mlx.dtype``, ``mlx.shape`` and ``UnsupportedError``
        ``mlx.mode``.
        """
        return list(_layers(entries, quantization_of(config), config_dtype(config)))

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a quantized tensor cannot be a packed layer of MLX; None if it can."""
        return (
            _why_floats_unsupported(spec)
            if spec.codec == ScaledCodebookLayout.codec
            else why_integers_unsupported(spec)
        )

    def layer_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return ``X.weight`` as 32-bit words, ``X.scales``, and for integers ``X.biases``."""
        stem = spec.name.removesuffix(WEIGHT)
        lead = spec.shape[:-1]
        cols = spec.shape[-1]
        if spec.codec == ScaledCodebookLayout.codec:
            floats = ScaledCodebookLayout.from_tensor(spec)
            packed, scales = floats.part_specs(spec.shape)
            words, groups = (*lead, cols * floats.bits // 32), (*lead, floats.groups(cols))
            return [
                FileEntry(packed.role, spec.name, "u32", words, packed.length or 0),
                FileEntry(scales.role, stem + SCALES, "u8", groups, scales.length or 0),
            ]
        layout = AffineLayout.from_tensor(spec)
        packed, scales, zeros = layout.part_specs(spec.shape)
        groups = (*lead, *layout.scale_shape(1, cols)[1:])
        words = (*lead, layout.row_bytes(cols) // 4)
        return [
            FileEntry(packed.role, spec.name, "u32", words, packed.length or 0),
            FileEntry(scales.role, stem + SCALES, scales.dtype, groups, scales.length or 0),
            FileEntry(zeros.role, stem + BIASES, zeros.dtype, groups, zeros.length or 0),
        ]

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return the keys as mlx_lm writes them: the most frequent grid is the default, and layers with another grid
        are listed.
        """
        layers = {
            spec.name.removesuffix(WEIGHT): _grid_of(spec)
            for spec in artifact.tensors
            if spec.codec in self.traits.packed_codecs
        }
        if not layers:
            return {}
        usual = Counter(layers.values()).most_common(1)[0][0]
        keys: dict[str, Any] = _grid_config(usual)
        keys.update({layer: _grid_config(grid) for layer, grid in sorted(layers.items()) if grid != usual})
        return dict.fromkeys(KEYS, keys)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata as text, with ``format`` ``mlx``, which MLX's loaders check."""
        return {**super().metadata(values), "format": "mlx"}


def _is_autoround(quantization: Config) -> bool:
    """Return whether AutoRound wrote this folder in MLX's layout."""
    return (
        quantization.get("quant_method") in AUTOROUND_METHODS
        and quantization.get("packing_format") in AUTOROUND_PACKINGS
    )


def quantization_of(config: Config) -> Quantization:
    """Return the packing that ``quantization`` declares.

    Raises
    ------
    FormatError
        ``mlx.config``: a value of the wrong type, or bits or a group that MLX does not support.
    UnsupportedError
        ``mlx.mode``: a mode that MLX 0.32 does not support.
    """
    quantization = config["quantization"]
    layers: dict[str, Grid | None] = {}
    for path, value in quantization.items():
        if isinstance(value, dict):
            layers[path] = _parse_grid(
                {"bits": quantization["bits"], "group_size": quantization["group_size"], **value}, path
            )
        elif value is False:
            layers[path] = None
    return Quantization(_parse_grid(quantization, "quantization"), layers)


def _parse_grid(values: Mapping[str, Any], location: str) -> Grid:
    mode = values.get("mode", MODE)
    bits = values["bits"]
    group = values["group_size"]
    location = f"{CONFIG}: {location[:200]}"
    if mode != MODE and (not isinstance(mode, str) or mode not in FLOATS):
        raise UnsupportedError(
            f"expected mode {', '.join((MODE, *FLOATS))}, found {str(mode)[:80]!r}; dequantize it with "
            "mlx_lm.convert -d first",
            rule="mlx.mode",
            where=location,
        )
    if mode != MODE:
        if type(bits) is not int or type(group) is not int or (bits, group) != FLOATS[mode][:2]:
            raise FormatError(
                "mlx.config",
                f"expected bits and group_size {FLOATS[mode][:2]} of mode {mode}, found {str(bits)[:40]} and "
                f"{str(group)[:40]}",
                where=location,
            )
        return Grid(bits, group, mode)
    if type(bits) is not int or bits not in BITS or type(group) is not int or group not in GROUPS:
        raise FormatError(
            "mlx.config",
            f"expected bits {', '.join(map(str, BITS))} and group_size {', '.join(map(str, GROUPS))}, found "
            f"{str(bits)[:40]} and {str(group)[:40]}",
            where=location,
        )
    return Grid(bits, group)


def _layers(entries: Entries, quantization: Quantization, dtype: str) -> Iterator[Layer]:
    for name in entries:
        if not name.endswith(WEIGHT) or entries[name].dtype != "u32":
            continue
        stem = name.removesuffix(WEIGHT)
        grid = quantization.grid_of(stem)
        if grid is None:
            continue
        _check(entries, name, stem, grid)
        shape = entries[name].shape
        if grid.mode != MODE:
            roles = {INDICES: name, FLOAT_SCALES: stem + SCALES}
            yield Layer(name, (*shape[:-1], shape[-1] * 32 // grid.bits), grid.layout(dtype), roles)
            continue
        parts = dict(zip(ROLES, (name, stem + SCALES, stem + BIASES), strict=True))
        layout = grid.layout(entries[stem + SCALES].dtype)
        yield Layer(name, (*shape[:-1], shape[-1] * 32 // grid.bits), layout, parts)


def _check(entries: Entries, name: str, stem: str, grid: Grid) -> None:
    if stem + ".global_scale" in entries:
        raise UnsupportedError(
            "expected nvfp4 without a scale for the tensor, found one", rule="mlx.mode", where=stem + ".global_scale"
        )
    suffixes = (SCALES, BIASES) if grid.mode == MODE else (SCALES,)
    required = require_entries(entries, stem, suffixes, "mlx.parts")
    scales = required[SCALES]
    biases = required.get(BIASES, required[SCALES])
    shape = entries[name].shape
    if grid.mode != MODE and (scales.dtype != "u8" or stem + BIASES in entries):
        raise FormatError(
            "mlx.dtype", f"expected scales in u8 and no biases of mode {grid.mode}, found {scales.dtype}", where=name
        )
    if grid.mode == MODE and (scales.dtype not in SCALE_DTYPES or biases.dtype != scales.dtype):
        raise FormatError(
            "mlx.dtype",
            f"expected scales and biases of one type, {', '.join(SCALE_DTYPES)}; found {scales.dtype} and "
            f"{biases.dtype}",
            where=name,
        )
    cols = shape[-1] * 32 // grid.bits if shape else 0
    scale_shape = (*shape[:-1], cols // grid.group)
    fits = len(shape) > 1 and shape[-1] * 32 == cols * grid.bits and cols % grid.group == 0
    if not fits or scales.shape != scale_shape or biases.shape != scale_shape:
        raise FormatError(
            "mlx.shape",
            f"expected words, scales and biases of {grid.bits} bits in groups of {grid.group}, as config.json "
            "declares, "
            f"found shapes {list(shape)}, {list(scales.shape)}, {list(biases.shape)}",
            where=name,
        )


def why_integers_unsupported(spec: TensorSpec) -> str | None:
    """Return why a tensor of integers cannot be a packed layer of MLX; None if it can."""
    try:
        layout = AffineLayout.from_tensor(spec)
    except CodecError as error:
        return error.message
    cols = spec.shape[-1] if spec.shape else 0
    if not spec.name.endswith(WEIGHT) or len(spec.shape) < 2:
        return f"its packed layers are matrices with names X{WEIGHT}, found shape {list(spec.shape)}"
    if layout.bits not in BITS or layout.group_size not in GROUPS or cols % layout.group_size:
        return (
            f"its packed layers have {', '.join(map(str, BITS))} bits in groups of {', '.join(map(str, GROUPS))} that "
            f"divide the columns, found {layout.bits} bits in groups of {layout.group_size} of {cols} columns"
        )
    expected = Grid(layout.bits, layout.group_size).layout(spec.dtype)
    if layout != replace(expected, scales=layout.scales) or layout.scales not in SCALE_DTYPES:
        return "its packed layers are unsigned codes with float offsets (zero_kind offset, packing rows_lsb)"
    parts = layout.part_specs(spec.shape)
    if [replace(part, type=None if part.type == part.dtype else part.type) for part in spec.parts] != list(parts):
        return f"its packed layers have the uncompressed parts {[part.role for part in parts]}, found other parts"
    return None


def _why_floats_unsupported(spec: TensorSpec) -> str | None:
    layout = layout_to_write(spec)
    if isinstance(layout, str):
        return layout
    if not any(Grid(bits, group, mode).layout(layout.dtype) == layout for mode, (bits, group, *_) in FLOATS.items()):
        return f"its packed layers of small floats are {', '.join(FLOATS)}, without a scale for the tensor"
    if not spec.name.endswith(WEIGHT) or len(spec.shape) < 2 or spec.shape[-1] % 32:
        return (
            f"its packed layers are matrices with names X{WEIGHT} and a multiple of 32 columns, found "
            f"{list(spec.shape)}"
        )
    return None


def _grid_of(spec: TensorSpec) -> Grid:
    if spec.codec == ScaledCodebookLayout.codec:
        layout = ScaledCodebookLayout.from_tensor(spec)
        modes = {Grid(bits, group, mode).layout(layout.dtype): mode for mode, (bits, group, *_) in FLOATS.items()}
        mode = modes[layout]
        return Grid(*FLOATS[mode][:2], mode)
    integers = AffineLayout.from_tensor(spec)
    return Grid(integers.bits, integers.group_size or 0)


def _grid_config(grid: Grid) -> dict[str, Any]:
    return {"group_size": grid.group, "bits": grid.bits, "mode": grid.mode}
