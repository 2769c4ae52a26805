"""torchao folders: tensors that torchao takes apart into codes, scales and zero points (``spec/interop.md``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.dialects.base import HUGGING_FACE, WEIGHT, Config, Dialect, Entries, Layer, taken_together
from ingot.formats.dialects.floats import FP8, config_dtype, fp8_layer
from ingot.model.layouts.affine import CODES, POINTS, SCALES, ZEROS
from ingot.model.layouts.words import INTS, WordsLayout

_QDATA, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_FLOATS = ("Float8Tensor",)
_SCALES = ("f16", "bf16", "f32")


class TorchaoFormat(Dialect):
    """``X._weight_qdata`` in bytes, ``X._weight_scale`` and, of integers, ``X._weight_zero_point``."""

    name = "torchao"
    summary = "a folder of torchao: dense tensors, integers in bytes (int8, and fewer bits unpacked) and FP8; read only"

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is torchao."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, Mapping) and stated.get("quant_method") == "torchao"

    def layers_in(self, catalog: Catalog, config: Config) -> Sequence[Layer]:
        """The metadata of the files say of which class each tensor is.

        Raises ``FormatError`` ``torchao.parts``, ``torchao.dtype``, ``torchao.shape``; ``UnsupportedError``
        ``torchao.type``: a class whose codes are packed otherwise.
        """
        entries, dtype = catalog.tensors, config_dtype(config)
        stems = [key.removesuffix(_QDATA) for key in entries if key.endswith(_QDATA)]
        found = []
        for stem in stems:
            kind = _kind(catalog.metadata.get(stem + WEIGHT))
            if kind in _FLOATS:
                found.append(_floats(entries, stem, dtype))
            elif kind in _INTEGERS:
                found.append(_integers(entries, stem, dtype))
            else:
                raise UnsupportedError(
                    f"expected a tensor of {', '.join((*_INTEGERS, *_FLOATS))}, found {kind[:80] or 'no word of it'}",
                    rule="torchao.type",
                    where=stem + WEIGHT,
                )
        return found

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """As ``layers_in`` of a file without metadata."""
        return self.layers_in(Catalog(entries), config)


def _kind(text: Any) -> str:
    try:
        stated = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return ""
    return str(stated.get("_type", "")) if isinstance(stated, dict) else ""


def _floats(entries: Entries, stem: str, dtype: str) -> Layer:
    taken = taken_together(entries, stem, (_QDATA, _SCALE), "torchao.parts")
    if taken[_QDATA].dtype not in FP8:
        raise FormatError("torchao.dtype", f"expected FP8, found {taken[_QDATA].dtype}", where=stem + _QDATA)
    return replace(fp8_layer(entries, stem + _QDATA, stem + _SCALE, "torchao", dtype), name=stem + WEIGHT)


def _integers(entries: Entries, stem: str, dtype: str) -> Layer:
    codes, scale, zeros = taken_together(entries, stem, (_QDATA, _SCALE, _ZERO), "torchao.parts").values()
    if codes.dtype != "i8" or zeros.dtype != "i8" or scale.dtype not in _SCALES:
        raise FormatError(
            "torchao.dtype",
            f"expected codes and zero points in i8 and scales of {', '.join(_SCALES)}, found {codes.dtype}, "
            f"{zeros.dtype} and {scale.dtype}",
            where=stem,
        )
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    matrix = len(codes.shape) == 2 and groups and codes.size
    if not matrix or zeros.shape != scale.shape or scale.shape[0] != codes.shape[0] or codes.shape[1] % groups:
        raise FormatError(
            "torchao.shape",
            f"expected a matrix with scales and zero points for groups of its rows, found {list(codes.shape)}, "
            f"{list(scale.shape)} and {list(zeros.shape)}",
            where=stem,
        )
    group = None if groups == 1 else codes.shape[1] // groups
    rows, cols = codes.shape
    layout = WordsLayout(INTS, 8, group, POINTS, dtype, scale.dtype)
    parts = {CODES: codes.name, SCALES: scale.name, ZEROS: zeros.name}
    return Layer(stem + WEIGHT, (rows, cols), layout, parts)
