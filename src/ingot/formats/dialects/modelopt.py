"""Folders of NVIDIA's ModelOpt: NVFP4 and FP8 (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.dialects.base import HUGGING_FACE, WEIGHT, Config, Dialect, Entries, Layer
from ingot.formats.dialects.floats import FP8, config_dtype, fp4_layer, fp8_layer
from ingot.model.layouts.scaled_codebook import INDICES, MULTIPLY, SCALES, SECOND

_SCALE, _SECOND = "_scale", "_scale_2"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8", "MIXED_PRECISION")


class ModelOptFormat(Dialect):
    """``X.weight`` (U8 or F8_E4M3), ``X.weight_scale`` and, of NVFP4, ``X.weight_scale_2``."""

    name = "modelopt"
    summary = "a folder of NVIDIA's ModelOpt: NVFP4 and FP8; read only"

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
