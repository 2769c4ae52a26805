"""torchao folders: tensors that torchao takes apart into codes, scales and zero points (``spec/interop.md``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.packed_folders.base import HUGGING_FACE, WEIGHT, Config, Dialect, Entries, Layer, taken_together
from ingot.formats.packed_folders.config_keys import Key, irrelevant, used
from ingot.formats.packed_folders.floats import FP8, POWERS, config_dtype, fp8_layer
from ingot.model.layouts.affine import CODES, POINTS, SCALES, ZEROS, Group
from ingot.model.layouts.packed_words import INTS, TORCHAO, WordsLayout
from ingot.model.layouts.scaled_codebook import INDICES, MULTIPLY, SECOND, ScaledCodebookLayout
from ingot.model.tensor import Tensor

_QDATA, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_SECOND, _FACTORS = "._weight_per_tensor_scale", "._weight_act_pre_scale"
_SCALES = ("f16", "bf16", "f32")
_BLOCK = (128, 4)  # scales that lie together where they are swizzled


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "quant_type": used("how inputs are quantized; the files' metadata say how weights are"),
    "quant_type_kwargs": irrelevant("the files' metadata say how weights are quantized"),
    "modules_to_not_convert": irrelevant("which layers are dense; the entries show it"),
    "include_input_output_embeddings": irrelevant("which layers are packed; the entries show it"),
    "untie_embedding_weights": irrelevant("whether the head has a weight of its own; the entries show it"),
}
"""What the reader does with each key."""


class TorchaoFormat(Dialect):
    """``X._weight_qdata``, ``X._weight_scale`` and, of integers, ``X._weight_zero_point``."""

    name = "torchao"
    summary = "a folder of torchao: dense tensors, integers of 1 to 8 bits, FP8, MXFP8, MXFP4 and NVFP4; read only"

    keys = KEYS
    companions = (_QDATA, _SCALE, _ZERO, _SECOND, _FACTORS)

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is torchao."""
        stated = config.get(HUGGING_FACE)
        return isinstance(stated, Mapping) and stated.get("quant_method") == "torchao"

    def layers_in(self, catalog: Catalog, config: Config) -> Sequence[Layer]:
        """The metadata of the files say of which class each tensor is.

        Raises ``FormatError`` ``torchao.parts``, ``torchao.dtype``, ``torchao.shape``; ``UnsupportedError``
        ``torchao.type``: a class whose codes are packed otherwise, or whose inputs are multiplied by something.
        """
        entries, dtype = catalog.tensors, config_dtype(config)
        found = []
        for stem in [key.removesuffix(_QDATA) for key in entries if key.endswith(_QDATA)]:
            kind, data = _stated(catalog.metadata.get(stem + WEIGHT))
            if kind not in _KINDS or stem + _FACTORS in entries:
                known = f"a tensor of {', '.join(_KINDS)} whose inputs stay as they are"
                raise UnsupportedError(
                    f"expected {known}, found {kind[:80] or 'no word of it'}", rule="torchao.type", where=stem + WEIGHT
                )
            found.append(_KINDS[kind](entries, stem, dtype, data))
        return found

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """As ``layers_in`` of a file without metadata."""
        return self.layers_in(Catalog(entries), config)

    def activations(self, config: Config) -> Mapping[str, str]:
        """The class under ``quant_type``, if it quantizes inputs too."""
        kind = self.quantization(config).get("quant_type")
        default = kind.get("default") if isinstance(kind, Mapping) else None
        name = str(default.get("_type", "") if isinstance(default, Mapping) else kind)[:80]
        return {"quant_type": name} if "activation" in name.lower() else {}


def _stated(text: Any) -> tuple[str, Mapping[str, Any]]:
    """Return a tensor's class and what it says of itself."""
    try:
        stated = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return "", {}
    if not isinstance(stated, dict):
        return "", {}
    data = stated.get("_data")
    return str(stated.get("_type", "")), data if isinstance(data, dict) else {}


def _floats(entries: Entries, stem: str, dtype: str, _: Mapping[str, Any]) -> Layer:
    taken = taken_together(entries, stem, (_QDATA, _SCALE), "torchao.parts")
    if taken[_QDATA].dtype not in FP8:
        raise FormatError("torchao.dtype", f"expected FP8, found {taken[_QDATA].dtype}", where=stem + _QDATA)
    return replace(fp8_layer(entries, stem + _QDATA, stem + _SCALE, "torchao", dtype), name=stem + WEIGHT)


def _integers(entries: Entries, stem: str, dtype: str, _: Mapping[str, Any]) -> Layer:
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


def _int4(entries: Entries, stem: str, dtype: str, _: Mapping[str, Any]) -> Layer:
    """Two signed codes a byte, the first in the low bits; scales and what is added to products by groups, then rows."""
    codes, scale, zeros = taken_together(entries, stem, (_QDATA, _SCALE, _ZERO), "torchao.parts").values()
    if codes.dtype not in ("i8", "u8") or scale.dtype not in _SCALES or zeros.dtype != scale.dtype:
        raise FormatError(
            "torchao.dtype",
            f"expected i8 and numbers of {', '.join(_SCALES)}, found {codes.dtype}, {scale.dtype} and {zeros.dtype}",
            where=stem,
        )
    rows, cols = (codes.shape[0], 2 * codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
    groups = scale.shape[0] if len(scale.shape) == 2 else 0
    if not rows or not cols or not groups or scale.shape != (groups, rows) or zeros.shape != scale.shape:
        raise _other_shapes(stem, "scales and zero points for groups of rows", codes, scale, zeros)
    if cols % groups:
        raise _other_shapes(stem, f"groups that divide {cols} columns", codes, scale, zeros)
    layout = WordsLayout(TORCHAO, 4, None if groups == 1 else cols // groups, POINTS, dtype, scale.dtype)
    return Layer(stem + WEIGHT, (rows, cols), layout, {CODES: codes.name, SCALES: scale.name, ZEROS: zeros.name})


def _small(entries: Entries, stem: str, dtype: str, data: Mapping[str, Any]) -> Layer:
    """MX formats and NVFP4: numbers of 4 or 8 bits with a small scale for 32 or 16 of a row, perhaps swizzled."""
    codes, scale = taken_together(entries, stem, (_QDATA, _SCALE), "torchao.parts").values()
    four, second = codes.dtype == "u8", stem + _SECOND in entries
    group = 32 if scale.dtype == POWERS else 16
    if scale.dtype not in (POWERS, "f8_e4m3fn") or codes.dtype not in ("u8", *FP8) or (group == 16 and not four):
        raise FormatError(
            "torchao.dtype", f"expected small floats and scales, found {codes.dtype} and {scale.dtype}", where=stem
        )
    rows, cols = (codes.shape[0], codes.shape[1] * (2 if four else 1)) if len(codes.shape) == 2 else (0, 0)
    if not rows or not cols or cols % group or data.get("block_size", group) != group:
        raise _other_shapes(stem, f"a matrix with a scale for {group} of a row", codes, scale)
    swizzled = bool(data.get("is_swizzled_scales"))
    grid = (rows, cols // group)
    held = tuple(-(-size // step) * step for size, step in zip(grid, _BLOCK, strict=True)) if swizzled else grid
    if scale.size != prod(held) or (not swizzled and scale.shape != grid):
        raise _other_shapes(stem, f"{list(held)} scales", codes, scale)
    if second and (entries[stem + _SECOND].dtype != "f32" or entries[stem + _SECOND].size != 1):
        raise _other_shapes(stem, "one second scale in f32", entries[stem + _SECOND])
    values = "f4_e2m1fn" if four else codes.dtype
    layout = ScaledCodebookLayout(
        4 if four else 8, Group(group), dtype, scales=scale.dtype, values=values, second=MULTIPLY if second else None
    )
    parts = {INDICES: codes.name, SCALES: scale.name} | ({SECOND: stem + _SECOND} if second else {})
    made = {SCALES: partial(_unswizzled, rows=rows, groups=grid[1])} if swizzled else {}
    return Layer(stem + WEIGHT, (rows, cols), layout, parts, (), made)


def _unswizzled(stored: bytes, rows: int, groups: int) -> bytes:
    """Return scales row by row, of blocks of 128 rows and 4 scales, which have rows 32 apart side by side."""
    tall, wide = -(-rows // _BLOCK[0]), -(-groups // _BLOCK[1])
    blocks = np.frombuffer(stored, np.uint8).reshape(tall, wide, 32, 4, 4)
    return blocks.transpose(0, 3, 2, 1, 4).reshape(128 * tall, 4 * wide)[:rows, :groups].tobytes()


def _other_shapes(stem: str, expected: str, *found: Tensor) -> FormatError:
    shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in found)
    return FormatError("torchao.shape", f"expected {expected}, found {shapes}", where=stem)


_Make = Callable[[Entries, str, str, Mapping[str, Any]], Layer]
_KINDS: Mapping[str, _Make] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Int4Tensor": _int4,
    "Float8Tensor": _floats,
    "MXTensor": _small,
    "NVFP4Tensor": _small,
}
