"""FP8 folders: E4M3 numbers with a scale per block, row or matrix (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Format
from ingot.formats.packed_folders.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, WritablePackedFolderFormat
from ingot.formats.packed_folders.compressed_keys import ACTIVATIONS
from ingot.formats.packed_folders.compressed_settings import summarize
from ingot.formats.packed_folders.config_keys import Key, irrelevant, refused, repeated, used
from ingot.formats.packed_folders.floats import (
    FP8,
    POWERS,
    SCALE_TYPES,
    block_size,
    config_dtype,
    dense_module_names,
    existing_entries,
    fp4_layer,
    fp8_layer,
    layout_to_write,
)
from ingot.formats.safetensors.pieces import FileEntry
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import ROW, PerTensor, Row
from ingot.model.layouts.base import Shape
from ingot.model.layouts.scaled_codebook import (
    DTYPES_OF_VALUES,
    INDICES,
    SCALES,
    Grid,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.spec import TensorSpec

_ROWS = "fbgemm_fp8"  # the method with a scale for each row
_METHODS = ("fp8", _ROWS, "finegrained_fp8")
_INVERSE = "_scale_inv"  # weights are multiplied by it, although the name means the inverse
_SCALE = "_scale"
_SCALES = (_INVERSE, _SCALE)
_BLOCK = "weight_block_size"
_SCALE_KIND = "scale_fmt"
_POWERS = "ue8m0"
# upper limit of input scales, with transformers' default
_BOUND = "activation_scale_ub"
_NO_BOUND = 1200.0
_SCHEME = "activation_scheme"
_STATIC = "static"
_DYNAMIC = "dynamic"
_INPUTS = (".input_scale", ".activation_scale")  # vLLM's name and transformers'


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "fmt": refused("floats of another type", "e4m3", "e5m2"),
    _BLOCK: used("rows and columns of a block"),
    _SCHEME: used("how inputs are quantized"),
    _SCALE_KIND: used("whether scales are powers of two; their type shows it"),
    _BOUND: used("the bound of scales of inputs"),
    "expert_dtype": refused("experts of another type", "fp8", "fp4"),
    "kv_cache_scheme": used("how keys and values are quantized", ACTIVATIONS),
    "dequantize": irrelevant("a setting of the program that loads the folder"),
    "store_dtype": refused("the loading program stores experts in another type"),
    **repeated(
        irrelevant("which layers are packed; the types of the entries show it"),
        "modules_to_not_convert modules_to_convert ignored_layers",
    ),
    **repeated(irrelevant("the name of the layout; shapes of the scales show it"), "method format weight_scale_method"),
    "weight_scale_semantics": refused("scales are divided by", "inverse"),
    **repeated(
        irrelevant("a setting of the run that quantized the model"), "bits group_size desc_act sym lm_head meta"
    ),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class Fp8Format(WritablePackedFolderFormat):
    """A folder with layers in FP8: ``X.weight`` (F8_E4M3) times ``X.weight_scale_inv`` or ``X.weight_scale``.

    ``config.json`` applies to all layers. With the ``quant_method`` fp8, all blocks have one size, or there are no
    blocks. With fbgemm_fp8, each row has a scale.
    """

    name = "fp8"
    summary = "a folder of FP8 weights with a scale per block (DeepSeek, Qwen), row or matrix"
    traits = replace(
        WritablePackedFolderFormat.traits,
        packed_codecs=(ScaledCodebookLayout.codec,),
        merges=True,
        dense_key="modules_to_not_convert",
        how_to_quantize="--recipe fp8-block",
    )
    keys = KEYS
    companions = (_INVERSE, WEIGHT + _SCALE)

    def __init__(self, grid: Grid | None = None) -> None:
        """Create the format.

        ``grid`` is the grid of the scales in all written layers; if it is None, each layer keeps its grid.
        """
        self._grid = grid

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is fp8 or fbgemm_fp8."""
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, Mapping) and quantization.get("quant_method") in _METHODS

    def for_activations(self, scheme: str) -> Format:
        """Return this format for scheme fp8, because its layers quantize their inputs to FP8 while the model runs."""
        return self if scheme == "fp8" else super().for_activations(scheme)

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers among ``entries``.

        Raises ``FormatError`` ``fp8.config``, ``fp8.parts``, ``fp8.dtype``, ``fp8.shape``.
        """
        block = block_size(config[HUGGING_FACE].get(_BLOCK), self.name)
        dtype = config_dtype(config)
        layers = []
        for key, entry in entries.items():
            scales = existing_entries(entries, key, _SCALES) or existing_entries(
                entries, key.removesuffix(WEIGHT), (".scale",)
            )
            if entry.dtype in FP8:
                if not scales:
                    raise FormatError(
                        "fp8.parts",
                        f"expected the entry {key + _INVERSE!r} of this weight, but it is missing",
                        where=key,
                    )
                layers.append(fp8_layer(entries, key, scales[0], self.name, dtype, block))
            elif entry.dtype == "i8" and scales:  # experts of DeepSeek V4
                keys = {INDICES: key, SCALES: scales[0]}
                layers.append(fp4_layer(entries, keys, self.name, dtype, None, key, 32))
        return layers

    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be a packed layer; None if it can."""
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        expected = ScaledCodebookLayout(8, layout.grid, layout.dtype, scales=layout.scales, values="f8_e4m3fn")
        scale_types = DTYPES_OF_VALUES if layout.grid == ROW else SCALE_TYPES
        if (
            layout != expected
            or layout.scales not in scale_types
            or not isinstance(layout.grid, Row | PerTensor | Tiles)
        ):
            return "its packed layers are of f8_e4m3fn with scales for blocks, the matrix or each row"
        stack = len(spec.shape) == 3 and isinstance(layout.grid, Tiles)
        if not spec.size or not (stack or (len(spec.shape) == 2 and spec.name.endswith(WEIGHT))):
            return f"its packed layers are matrices X{WEIGHT}, and stacks of them with scales for blocks"
        return None

    def for_artifact(self, artifact: Artifact) -> Fp8Format:
        """Return the format with the grid that the scales of all layers share.

        Raises ``UnsupportedError`` ``fp8.mixed`` if layers have different grids, because ``config.json`` states only
        one.
        """
        packed = [(spec.shape, _grid(spec)) for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        grids = dict.fromkeys(grid for _, grid in packed)
        declared = block_size(self.source_config(artifact).get(_BLOCK), self.name)
        before = () if declared is None else (Tiles(*declared),)
        usual = sorted(grids, key=lambda grid: not isinstance(grid, Tiles))
        for grid in (*before, *usual):
            if all(_fits_grid(grid, shape, layer_grid) for shape, layer_grid in packed):
                return Fp8Format(grid)
        if not packed:
            return self
        raise UnsupportedError(
            f"expected scales on one grid in all packed layers, found {', '.join(map(_describe, grids))}: config.json "
            "can state only one, while compressed-tensors can state several (--format compressed-tensors)",
            rule="fp8.mixed",
        )

    def layer_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return ``X.weight`` and ``X.weight_scale_inv``, or ``X.weight_scale`` if there is a scale per row."""
        layout = ScaledCodebookLayout.from_tensor(spec)
        grid = self._grid or _grid(spec)
        *stack, rows, cols = spec.shape
        suffix = _INVERSE
        shape = tuple[int, ...]()
        if isinstance(grid, Row):
            suffix = _SCALE
            shape = (rows, 1)
        elif isinstance(grid, Tiles):
            shape = (*stack, -(-rows // grid.rows), -(-cols // grid.columns))
        size = DTYPES[layout.scales].nbytes(layout.scale_count(spec.shape))
        return [
            FileEntry(INDICES, spec.name, "f8_e4m3fn", spec.shape, spec.size),
            FileEntry(SCALES, spec.name + suffix, layout.scales, shape, size),
        ]

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` for transformers and vLLM."""
        packed = [spec for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        if not packed:
            return {}
        source = self.source_config(artifact)
        grid = self.for_artifact(artifact)._grid
        dense = {"modules_to_not_convert": dense_module_names(artifact, self.traits.packed_codecs)}
        if isinstance(grid, Row):
            return {HUGGING_FACE: {"quant_method": _ROWS, _BOUND: source.get(_BOUND, _NO_BOUND), **dense}}
        scheme = _STATIC if _is_static(artifact, packed, source, grid) else _DYNAMIC
        keys = {"quant_method": "fp8", "fmt": "e4m3", _SCHEME: scheme}
        block = [grid.rows, grid.columns] if isinstance(grid, Tiles) else None
        powers = {_SCALE_KIND: _POWERS} if _has_powers(artifact, packed, source) else {}
        return {HUGGING_FACE: {**keys, _BLOCK: block, **powers, **dense}}

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return ``activation_scheme`` if it is static; a dynamic scheme stores no numbers that could be lost."""
        quantization = config.get(HUGGING_FACE)
        scheme = quantization.get(_SCHEME) if isinstance(quantization, Mapping) else None
        return {} if scheme in (None, _DYNAMIC) else {_SCHEME: summarize(scheme)}


def _grid(spec: TensorSpec) -> Grid:
    return ScaledCodebookLayout.from_tensor(spec).grid


def _fits_grid(grid: Grid, shape: Shape, layer_grid: Grid) -> bool:
    """Return whether the scales of a layer with ``shape`` on ``layer_grid`` are also scales on ``grid``.

    This is true if the grids are equal, or if a row or the matrix is within one block.
    """
    if layer_grid == grid:
        return True
    rows, cols = shape[-2:]
    if isinstance(grid, Tiles):
        fits = isinstance(layer_grid, Row) and grid.rows == 1
        return (fits or (isinstance(layer_grid, PerTensor) and rows <= grid.rows)) and cols <= grid.columns
    return isinstance(layer_grid, PerTensor) and isinstance(grid, Row) and rows == 1


def _describe(grid: Grid) -> str:
    if isinstance(grid, Tiles):
        return f"blocks of {grid.rows} x {grid.columns}"
    return "rows" if isinstance(grid, Row) else "one for a matrix"


def _is_static(artifact: Artifact, packed: Sequence[TensorSpec], source: Config, grid: Grid | None) -> bool:
    """Return whether the folder declares static scales of inputs.

    The result is True if the source does not declare dynamic scales, and each packed layer has an entry with its input
    scale. If the source declares neither, scales are dynamic if it is an FP8 folder, or if ``grid`` consists of tiles.
    """
    if source.get(_SCHEME, _DYNAMIC if isinstance(grid, Tiles) or source else _STATIC) != _STATIC:
        return False
    names = {spec.name for spec in artifact.tensors}
    layers = (spec.name.removesuffix(WEIGHT) for spec in packed)
    return all(any(layer + suffix in names for suffix in _INPUTS) for layer in layers)


def _has_powers(artifact: Artifact, packed: Sequence[TensorSpec], source: Config) -> bool:
    """Return whether the scales of all ``packed`` layers are powers of two.

    This is true if the type of the scales has only powers of two, or if the source declares powers of two for the same
    layers.
    """
    if all(ScaledCodebookLayout.from_tensor(spec).scales == POWERS for spec in packed):
        return True
    before = artifact.before
    same = all(spec.name in before and before[spec.name].params == spec.params for spec in packed)
    return same and source.get(_SCALE_KIND) == _POWERS
