"""FP8 folders: E4M3 numbers with a scale per block, row or matrix (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.dtypes import DTYPES
from ingot.errors import FormatError
from ingot.formats.dialects.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, PackingDialect
from ingot.formats.dialects.compressed_settings import brief
from ingot.formats.dialects.floats import (
    FP8,
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
from ingot.model.layouts.scaled_codebook import INDICES, SCALES, ScaledCodebookLayout, Tiles
from ingot.model.spec import TensorSpec

BLOCK = Tiles(128, 128)
_METHODS = ("fp8", "fbgemm_fp8", "finegrained_fp8")
_INVERSE = "_scale_inv"  # of what it was divided by: weights are multiplied by it
_SCALES = (_INVERSE, "_scale")
_SCHEME, _STATIC = "activation_scheme", "static"
_INPUTS = (".input_scale", ".activation_scale")  # vLLM's name and transformers'


class Fp8Format(PackingDialect):
    """``X.weight`` (F8_E4M3) and ``X.weight_scale_inv`` or ``X.weight_scale``, which it is multiplied by."""

    name = "fp8"
    summary = "a folder of FP8 weights with a scale per block (DeepSeek, Qwen), row or matrix"
    codecs = (ScaledCodebookLayout.codec,)

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is fp8 or fbgemm_fp8."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, Mapping) and stated.get("quant_method") in _METHODS

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Raises ``FormatError`` ``fp8.config``, ``fp8.parts``, ``fp8.dtype``, ``fp8.shape``."""
        block = block_size(config[HUGGING_FACE].get("weight_block_size"), self.name)
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
        """Why a tensor cannot be a matrix of FP8 blocks; None if it can."""
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        wanted = ScaledCodebookLayout(8, BLOCK, layout.dtype, scales=layout.scales, values="f8_e4m3fn")
        if (
            layout != wanted
            or layout.scales not in SCALE_TYPES
            or not spec.name.endswith(WEIGHT)
            or len(spec.shape) != 2
        ):
            return f"its packed layers are matrices X{WEIGHT} of f8_e4m3fn with scales for blocks of 128 x 128"
        return None

    def layer_pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """``X.weight`` and ``X.weight_scale_inv``."""
        layout = ScaledCodebookLayout.of(spec)
        rows, cols = spec.shape
        blocks = (-(-rows // 128), -(-cols // 128))
        size = DTYPES[layout.scales].nbytes(blocks[0] * blocks[1])
        return [
            Piece(INDICES, spec.name, "f8_e4m3fn", spec.shape, rows * cols),
            Piece(SCALES, spec.name + _INVERSE, layout.scales, blocks, size),
        ]

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as transformers and vLLM read it."""
        if not any(spec.codec in self.codecs for spec in artifact.tensors):
            return {}
        scheme = _STATIC if self._is_static(artifact) else "dynamic"
        keys = {"quant_method": "fp8", "fmt": "e4m3", _SCHEME: scheme, "weight_block_size": [128, 128]}
        dense = module_names(artifact.tensors, self.codecs)
        return {HUGGING_FACE: {**keys, "modules_to_not_convert": dense}}

    def activations(self, config: Config) -> Mapping[str, str]:
        """``activation_scheme``."""
        stated = config.get(HUGGING_FACE)
        scheme = stated.get(_SCHEME) if isinstance(stated, Mapping) else None
        return {} if scheme is None else {_SCHEME: brief(scheme)}

    def _is_static(self, artifact: Artifact) -> bool:
        """Whether the source's inputs had scales of their own, and each packed layer still has its."""
        if self.source_config(artifact).get(_SCHEME) != _STATIC:
            return False
        names = {spec.name for spec in artifact.tensors}
        layers = (spec.name.removesuffix(WEIGHT) for spec in artifact.tensors if spec.codec in self.codecs)
        return all(any(layer + suffix in names for suffix in _INPUTS) for layer in layers)
