"""FP8 folders: E4M3 numbers with a scale per block, row or matrix (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, PackingDialect
from ingot.formats.packed_folders.compressed_keys import ACTIVATIONS
from ingot.formats.packed_folders.compressed_settings import brief
from ingot.formats.packed_folders.config_keys import Key, irrelevant, refused, repeated, used
from ingot.formats.packed_folders.floats import (
    FP8,
    POWERS,
    SCALE_TYPES,
    block_size,
    config_dtype,
    fp4_layer,
    fp8_layer,
    layout_to_write,
    module_names,
    present,
)
from ingot.formats.safetensors.pieces import Piece
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import ROW, Row, Whole
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

_ROWS = "fbgemm_fp8"  # what has a scale for each row
_METHODS = ("fp8", _ROWS, "finegrained_fp8")
_INVERSE = "_scale_inv"  # of what it was divided by: weights are multiplied by it
_SCALE = "_scale"
_SCALES = (_INVERSE, _SCALE)
_BLOCK, _SCALE_KIND, _POWERS = "weight_block_size", "scale_fmt", "ue8m0"
_BOUND, _NO_BOUND = "activation_scale_ub", 1200.0  # of scales of inputs; the default of transformers
_SCHEME, _STATIC, _DYNAMIC = "activation_scheme", "static", "dynamic"
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
"""What the reader does with each key."""


class Fp8Format(PackingDialect):
    """``X.weight`` (F8_E4M3) and ``X.weight_scale_inv`` or ``X.weight_scale``, which it is multiplied by.

    What ``config.json`` says holds for all layers: the block, or none, of ``quant_method`` fp8; rows of fbgemm_fp8.
    """

    name = "fp8"
    summary = "a folder of FP8 weights with a scale per block (DeepSeek, Qwen), row or matrix"
    traits = replace(
        PackingDialect.traits,
        packed_codecs=(ScaledCodebookLayout.codec,),
        merges=True,
        dense_key="modules_to_not_convert",
        how_to_quantize=(
            'a recipe with codec = "scaled_codebook" and options = { table = "f8_e4m3fn", group = [128, 128] }'
        ),
    )
    keys = KEYS
    companions = (_INVERSE, WEIGHT + _SCALE)

    def __init__(self, grid: Grid | None = None) -> None:
        """``grid``: that of all layers of a folder that is written; each layer's own where none is known."""
        self._grid = grid

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is fp8 or fbgemm_fp8."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, Mapping) and stated.get("quant_method") in _METHODS

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Raises ``FormatError`` ``fp8.config``, ``fp8.parts``, ``fp8.dtype``, ``fp8.shape``."""
        block = block_size(config[HUGGING_FACE].get(_BLOCK), self.name)
        dtype = config_dtype(config)
        found = []
        for key, entry in entries.items():
            scales = present(entries, key, _SCALES) or present(entries, key.removesuffix(WEIGHT), (".scale",))
            if entry.dtype in FP8:
                if not scales:
                    raise FormatError("fp8.parts", f"expected {key + _INVERSE!r} beside it, found none", where=key)
                found.append(fp8_layer(entries, key, scales[0], self.name, dtype, block))
            elif entry.dtype == "i8" and scales:  # experts of DeepSeek V4
                keys = {INDICES: key, SCALES: scales[0]}
                found.append(fp4_layer(entries, keys, self.name, dtype, None, key, 32))
        return found

    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a tensor cannot be a packed layer; None if it can."""
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        wanted = ScaledCodebookLayout(8, layout.grid, layout.dtype, scales=layout.scales, values="f8_e4m3fn")
        known = DTYPES_OF_VALUES if layout.grid == ROW else SCALE_TYPES
        if layout != wanted or layout.scales not in known or not isinstance(layout.grid, Row | Whole | Tiles):
            return "its packed layers are of f8_e4m3fn with scales for blocks, the matrix or each row"
        stack = len(spec.shape) == 3 and isinstance(layout.grid, Tiles)
        if not spec.size or not (stack or (len(spec.shape) == 2 and spec.name.endswith(WEIGHT))):
            return f"its packed layers are matrices X{WEIGHT}, and stacks of them with scales for blocks"
        return None

    def fitted(self, artifact: Artifact) -> Fp8Format:
        """Return the dialect with the one grid of scales that all layers have.

        Raises ``UnsupportedError`` ``fp8.mixed``: layers with scales on several grids, of which ``config.json`` says
        one.
        """
        packed = [(spec.shape, _grid(spec)) for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        grids = dict.fromkeys(grid for _, grid in packed)
        stated = block_size(self.source_config(artifact).get(_BLOCK), self.name)
        before = () if stated is None else (Tiles(*stated),)
        usual = sorted(grids, key=lambda grid: not isinstance(grid, Tiles))
        for grid in (*before, *usual):
            if all(_lies_on(grid, shape, own) for shape, own in packed):
                return Fp8Format(grid)
        if not packed:
            return self
        raise UnsupportedError(
            f"expected scales on one grid in all packed layers, found {', '.join(map(_shown, grids))}: config.json "
            "says one, that of compressed-tensors several (--format compressed-tensors)",
            rule="fp8.mixed",
        )

    def layer_pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """``X.weight``, and ``X.weight_scale_inv``; of rows ``X.weight_scale``."""
        layout, grid = ScaledCodebookLayout.of(spec), self._grid or _grid(spec)
        *stack, rows, cols = spec.shape
        suffix, shape = _INVERSE, tuple[int, ...]()
        if isinstance(grid, Row):
            suffix, shape = _SCALE, (rows, 1)
        elif isinstance(grid, Tiles):
            shape = (*stack, -(-rows // grid.rows), -(-cols // grid.columns))
        size = DTYPES[layout.scales].nbytes(layout.scale_count(spec.shape))
        return [
            Piece(INDICES, spec.name, "f8_e4m3fn", spec.shape, spec.size),
            Piece(SCALES, spec.name + suffix, layout.scales, shape, size),
        ]

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as transformers and vLLM read it."""
        packed = [spec for spec in artifact.tensors if spec.codec in self.traits.packed_codecs]
        if not packed:
            return {}
        source, grid = self.source_config(artifact), self.fitted(artifact)._grid
        dense = {"modules_to_not_convert": module_names(artifact, self.traits.packed_codecs)}
        if isinstance(grid, Row):
            return {HUGGING_FACE: {"quant_method": _ROWS, _BOUND: source.get(_BOUND, _NO_BOUND), **dense}}
        scheme = _STATIC if _is_static(artifact, packed, source, grid) else _DYNAMIC
        keys = {"quant_method": "fp8", "fmt": "e4m3", _SCHEME: scheme}
        block = [grid.rows, grid.columns] if isinstance(grid, Tiles) else None
        powers = {_SCALE_KIND: _POWERS} if _has_powers(artifact, packed, source) else {}
        return {HUGGING_FACE: {**keys, _BLOCK: block, **powers, **dense}}

    def activations(self, config: Config) -> Mapping[str, str]:
        """``activation_scheme`` where it is more than the usual: what is dynamic has no numbers that could be lost."""
        stated = config.get(HUGGING_FACE)
        scheme = stated.get(_SCHEME) if isinstance(stated, Mapping) else None
        return {} if scheme in (None, _DYNAMIC) else {_SCHEME: brief(scheme)}


def _grid(spec: TensorSpec) -> Grid:
    return ScaledCodebookLayout.of(spec).grid


def _lies_on(grid: Grid, shape: Shape, own: Grid) -> bool:
    """Whether scales on a layer's own grid are those of another one: of a matrix that is no larger than a block."""
    if own == grid:
        return True
    rows, cols = shape[-2:]
    if isinstance(grid, Tiles):
        fits = isinstance(own, Row) and grid.rows == 1
        return (fits or (isinstance(own, Whole) and rows <= grid.rows)) and cols <= grid.columns
    return isinstance(own, Whole) and isinstance(grid, Row) and rows == 1


def _shown(grid: Grid) -> str:
    if isinstance(grid, Tiles):
        return f"blocks of {grid.rows} x {grid.columns}"
    return "rows" if isinstance(grid, Row) else "one for a matrix"


def _is_static(artifact: Artifact, packed: Sequence[TensorSpec], source: Config, grid: Grid | None) -> bool:
    """Whether inputs of each packed layer have a scale of their own: as the source says, or where weights have one too,
    which is how it lies in other folders."""
    if source.get(_SCHEME, _DYNAMIC if isinstance(grid, Tiles) or source else _STATIC) != _STATIC:
        return False
    names = {spec.name for spec in artifact.tensors}
    layers = (spec.name.removesuffix(WEIGHT) for spec in packed)
    return all(any(layer + suffix in names for suffix in _INPUTS) for layer in layers)


def _has_powers(artifact: Artifact, packed: Sequence[TensorSpec], source: Config) -> bool:
    """Whether scales are powers of two: by their type, or as the source says of the same layers."""
    if all(ScaledCodebookLayout.of(spec).scales == POWERS for spec in packed):
        return True
    before = artifact.before
    same = all(spec.name in before and before[spec.name].params == spec.params for spec in packed)
    return same and source.get(_SCALE_KIND) == _POWERS
