"""Folders of NVIDIA's ModelOpt: NVFP4 and FP8 (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.dialects.base import HUGGING_FACE, WEIGHT, Config, Entries, Layer, PackingDialect
from ingot.formats.dialects.floats import (
    FP4,
    FP8,
    config_dtype,
    fp4_layer,
    fp8_layer,
    layout_to_write,
    module_names,
)
from ingot.formats.safetensors.pieces import Piece
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import WHOLE, Group
from ingot.model.layouts.scaled_codebook import INDICES, MULTIPLY, SCALES, SECOND, ScaledCodebookLayout
from ingot.model.spec import TensorSpec

_SCALE, _SECOND = "_scale", "_scale_2"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8", "MIXED_PRECISION")


class ModelOptFormat(PackingDialect):
    """``X.weight`` (U8 or F8_E4M3), ``X.weight_scale`` and, of NVFP4, ``X.weight_scale_2``."""

    name = "modelopt"
    summary = "a folder of NVIDIA's ModelOpt: dense tensors, NVFP4 and FP8"
    codecs = (ScaledCodebookLayout.codec,)

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is modelopt."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, Mapping) and stated.get("quant_method") in ("modelopt", "modelopt_fp4")

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Raises ``FormatError`` ``modelopt.parts``, ``modelopt.dtype``, ``modelopt.shape``.

        ``UnsupportedError`` ``modelopt.algorithm``: packed otherwise.
        """
        algorithm = config[HUGGING_FACE].get("quant_algo")
        if algorithm not in (None, *_ALGORITHMS):
            raise UnsupportedError(
                f"expected quant_algo {', '.join(_ALGORITHMS)}, found {str(algorithm)[:80]!r}",
                rule="modelopt.algorithm",
            )
        dtype, found = config_dtype(config), []
        for key, entry in entries.items():
            packed = entry.dtype == "u8" and key.endswith(WEIGHT)
            if not packed and entry.dtype not in FP8:
                continue
            if entry.dtype in FP8 and key.endswith(_SCALE):
                continue
            if key + _SCALE not in entries or (packed and key + _SECOND not in entries):
                raise FormatError("modelopt.parts", f"expected {key + _SCALE!r} beside it, found none", where=key)
            if packed:
                keys = {INDICES: key, SCALES: key + _SCALE, SECOND: key + _SECOND}
                found.append(fp4_layer(entries, keys, self.name, dtype, MULTIPLY, key, 16))
            else:
                found.append(fp8_layer(entries, key, key + _SCALE, self.name, dtype))
        return found

    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a tensor cannot be a matrix of NVFP4 or FP8; None if it can."""
        layout = layout_to_write(spec)
        if isinstance(layout, str):
            return layout
        if layout not in (_nvfp4(layout.dtype), _fp8(layout.dtype)):
            return "its packed layers are NVFP4, whose scales are multiplied by a second one, and FP8 with one scale"
        if not spec.name.endswith(WEIGHT) or len(spec.shape) != 2 or not spec.size:
            return f"its packed layers are matrices called X{WEIGHT}, found shape {list(spec.shape)}"
        return None

    def layer_pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """``X.weight`` and ``X.weight_scale``, and ``X.weight_scale_2`` of NVFP4."""
        layout, (rows, cols) = ScaledCodebookLayout.of(spec), spec.shape
        if layout == _fp8(layout.dtype):
            return [
                Piece(INDICES, spec.name, "f8_e4m3fn", spec.shape, rows * cols),
                Piece(SCALES, spec.name + _SCALE, "f32", (), 4),
            ]
        return [
            Piece(INDICES, spec.name, "u8", (rows, cols // 2), rows * cols // 2),
            Piece(SCALES, spec.name + _SCALE, "f8_e4m3fn", (rows, cols // 16), rows * cols // 16),
            Piece(SECOND, spec.name + _SECOND, "f32", (), 4),
        ]

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as ModelOpt writes it; where no scales of activations are beside the weights,
        these alone are quantized."""
        layouts = [ScaledCodebookLayout.of(spec) for spec in artifact.tensors if spec.codec in self.codecs]
        if not layouts:
            return {}
        bits = {layout.bits for layout in layouts}
        activations = any(spec.name.endswith(".input_scale") for spec in artifact.tensors)
        algorithm = "FP8" if bits == {8} else "NVFP4" if activations else "W4A16_NVFP4"
        return {
            HUGGING_FACE: {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION" if len(bits) > 1 else algorithm,
                "producer": {"name": "modelopt"},
                "ignore": module_names(artifact.tensors, ScaledCodebookLayout.codec),
                **({} if bits == {8} else {"group_size": 16}),
            }
        }


def _nvfp4(dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(4, Group(16), dtype, scales="f8_e4m3fn", values=FP4, second=MULTIPLY)


def _fp8(dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(8, WHOLE, dtype, values="f8_e4m3fn")
