"""Folders of optimum-quanto: bytes with a scale for each row (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.dialects.base import HUGGING_FACE, Config, Dialect, Entries, Layer
from ingot.formats.dialects.floats import FP8, fp8_layer
from ingot.model.layouts.affine import CODES, NO_ZERO, ROW, ROWS_LSB, SCALES, AffineLayout
from ingot.model.layouts.dense import DATA
from ingot.model.store import Store
from ingot.model.tensor import Tensor

MAP = "quanto_qmap.json"
_DATA, _PACKED, _SCALE = "._data", "._data._data", "._scale"
_SCALES = ("f16", "bf16", "f32")
_ACTIVATIONS = (".input_scale", ".output_scale")


class QuantoFormat(Dialect):
    """``X.weight._data`` (I8 or FP8) and ``X.weight._scale``, a number a row."""

    name = "quanto"
    summary = "a folder of optimum-quanto: dense tensors, and matrices of int8 or FP8 with a scale per row; read only"

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is quanto; a folder of the package's own has ``quanto_qmap.json`` instead."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, Mapping) and stated.get("quant_method") == "quanto"

    def read_config(self, store: Store) -> dict[str, object]:
        """Return the folder's ``config.json``, with what ``quanto_qmap.json`` being there says."""
        config = super().read_config(store)
        return {**config, HUGGING_FACE: {"quant_method": "quanto"}} if store.exists(MAP) else config

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Raises ``FormatError`` ``quanto.parts``, ``quanto.dtype``, ``quanto.shape``; ``UnsupportedError``
        ``quanto.type``: codes of less than a byte, which it packs across rows."""
        found = []
        for key in entries:
            if key.endswith(_PACKED):
                raise UnsupportedError(
                    "expected int8 or FP8, found codes of 2 or 4 bits, which quanto packs across rows",
                    rule="quanto.type",
                    where=key,
                )
            if key.endswith(_DATA):
                found.append(_layer(entries, key.removesuffix(_DATA)))
        return found


def _layer(entries: Entries, name: str) -> Layer:
    codes, scale = entries[name + _DATA], entries.get(name + _SCALE)
    if scale is None:
        raise FormatError("quanto.parts", f"expected {name + _SCALE!r} beside it, found none", where=name)
    module = name.rpartition(".")[0]
    also = [key for ending in _ACTIVATIONS if (key := module + ending) in entries and _is_one(entries[key])]
    if codes.dtype in FP8:
        return replace(
            fp8_layer(entries, name + _DATA, name + _SCALE, "quanto", scale.dtype), name=name, also=tuple(also)
        )
    if codes.dtype != "i8" or scale.dtype not in _SCALES:
        raise FormatError("quanto.dtype", f"expected i8 or FP8, found {codes.dtype} and {scale.dtype}", where=name)
    if len(codes.shape) != 2 or scale.shape != (codes.shape[0], 1) or not prod(codes.shape):
        raise FormatError(
            "quanto.shape",
            f"expected a matrix and a scale for each row, found {list(codes.shape)} and {list(scale.shape)}",
            where=name,
        )
    layout = AffineLayout(8, ROW, ROWS_LSB, True, NO_ZERO, scale.dtype, scale.dtype)
    return Layer(name, codes.shape, layout, {CODES: codes.name, SCALES: scale.name}, tuple(also))


def _is_one(scale: Tensor) -> bool:
    """Whether a scale of activations says nothing: quanto writes 1 where they are not quantized."""
    return scale.size == 1 and scale.dtype in _SCALES and bool((scale.parts[DATA].array().astype("f4") == 1).all())
