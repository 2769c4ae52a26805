"""torchao folders, in which a tensor is stored as codes, scales and zero points (``spec/interop.md``)."""

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
from ingot.formats.packed_folders.base import (
    HUGGING_FACE,
    WEIGHT,
    Config,
    Entries,
    Layer,
    PackedFolderFormat,
    require_entries,
)
from ingot.formats.packed_folders.config_keys import Key, irrelevant, used
from ingot.formats.packed_folders.floats import FP8, POWERS, config_dtype, fp8_layer
from ingot.model.layouts.affine import CODES, POINTS, SCALES, ZEROS, Group
from ingot.model.layouts.packed_ints import INTS, TORCHAO, PackedIntLayout
from ingot.model.layouts.scaled_codebook import INDICES, MULTIPLY, SECOND, ScaledCodebookLayout
from ingot.model.tensor import Tensor

_QDATA = "._weight_qdata"
_SCALE = "._weight_scale"
_ZERO = "._weight_zero_point"
_SECOND = "._weight_per_tensor_scale"
_FACTORS = "._weight_act_pre_scale"
_SCALES = ("f16", "bf16", "f32")
_BLOCK = (128, 4)  # rows and columns of a block of swizzled scales


KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "quant_type": used("how inputs are quantized; the files' metadata say how weights are"),
    "quant_type_kwargs": irrelevant("the files' metadata say how weights are quantized"),
    "modules_to_not_convert": irrelevant("which layers are dense; the entries show it"),
    "include_input_output_embeddings": irrelevant("which layers are packed; the entries show it"),
    "untie_embedding_weights": irrelevant("whether the head has a weight of its own; the entries show it"),
}
"""For each key, whether the reader uses, ignores or refuses the key."""


class TorchaoFormat(PackedFolderFormat):
    """A folder of torchao with layers of integers or floats.

    Each layer has ``X._weight_qdata`` and ``X._weight_scale``; integers also have ``X._weight_zero_point``.
    """

    name = "torchao"
    summary = "a folder of torchao: dense tensors, integers of 1 to 8 bits, FP8, MXFP8, MXFP4 and NVFP4; read only"

    keys = KEYS
    companions = (_QDATA, _SCALE, _ZERO, _SECOND, _FACTORS)

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is torchao."""
        quantization = config.get(HUGGING_FACE)
        return isinstance(quantization, Mapping) and quantization.get("quant_method") == "torchao"

    def layers_in(self, catalog: Catalog, config: Config) -> Sequence[Layer]:
        """Return the layers; the metadata of the files names the class of each tensor.

        Raises ``FormatError`` ``torchao.parts``, ``torchao.dtype``, ``torchao.shape``; ``UnsupportedError``
        ``torchao.type``: a class with another packing, or with factors of inputs.
        """
        entries, dtype = catalog.tensors, config_dtype(config)
        layers = []
        for stem in [key.removesuffix(_QDATA) for key in entries if key.endswith(_QDATA)]:
            class_name, data = _parse_description(catalog.metadata.get(stem + WEIGHT))
            if class_name not in _READERS or stem + _FACTORS in entries:
                expected = f"a tensor of {', '.join(_READERS)} without factors of inputs"
                raise UnsupportedError(
                    f"expected {expected}, found {class_name[:80] or 'no class in the metadata'}",
                    rule="torchao.type",
                    where=stem + WEIGHT,
                )
            layers.append(_READERS[class_name](entries, stem, dtype, data))
        return layers

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the layers of a file without metadata; raises the errors of ``layers_in``."""
        return self.layers_in(Catalog(entries), config)

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return the class under ``quant_type`` if it also quantizes inputs."""
        quant_type = self.quantization(config).get("quant_type")
        default = quant_type.get("default") if isinstance(quant_type, Mapping) else None
        name = str(default.get("_type", "") if isinstance(default, Mapping) else quant_type)[:80]
        return {"quant_type": name} if "activation" in name.lower() else {}


def _parse_description(text: Any) -> tuple[str, Mapping[str, Any]]:
    """Parse the JSON text of the metadata: return the class of a tensor and its ``_data``."""
    try:
        description = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return "", {}
    if not isinstance(description, dict):
        return "", {}
    data = description.get("_data")
    return str(description.get("_type", "")), data if isinstance(data, dict) else {}


def _floats(entries: Entries, stem: str, dtype: str, _: Mapping[str, Any]) -> Layer:
    required = require_entries(entries, stem, (_QDATA, _SCALE), "torchao.parts")
    if required[_QDATA].dtype not in FP8:
        raise FormatError("torchao.dtype", f"expected FP8, found {required[_QDATA].dtype}", where=stem + _QDATA)
    return replace(fp8_layer(entries, stem + _QDATA, stem + _SCALE, "torchao", dtype), name=stem + WEIGHT)


def _integers(entries: Entries, stem: str, dtype: str, _: Mapping[str, Any]) -> Layer:
    codes, scale, zeros = require_entries(entries, stem, (_QDATA, _SCALE, _ZERO), "torchao.parts").values()
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
    layout = PackedIntLayout(INTS, 8, group, POINTS, dtype, scale.dtype)
    parts = {CODES: codes.name, SCALES: scale.name, ZEROS: zeros.name}
    return Layer(stem + WEIGHT, (rows, cols), layout, parts)


def _int4(entries: Entries, stem: str, dtype: str, _: Mapping[str, Any]) -> Layer:
    """Return the layer of signed codes, two per byte, the first in the low bits.

    Scales and offsets have the shape [groups, rows]. An offset is added to the product of a code and its scale.
    """
    codes, scale, zeros = require_entries(entries, stem, (_QDATA, _SCALE, _ZERO), "torchao.parts").values()
    if codes.dtype not in ("i8", "u8") or scale.dtype not in _SCALES or zeros.dtype != scale.dtype:
        raise FormatError(
            "torchao.dtype",
            f"expected i8 and numbers of {', '.join(_SCALES)}, found {codes.dtype}, {scale.dtype} and {zeros.dtype}",
            where=stem,
        )
    rows, cols = (codes.shape[0], 2 * codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
    groups = scale.shape[0] if len(scale.shape) == 2 else 0
    if not rows or not cols or not groups or scale.shape != (groups, rows) or zeros.shape != scale.shape:
        raise _shape_error(stem, "scales and zero points for groups of rows", codes, scale, zeros)
    if cols % groups:
        raise _shape_error(stem, f"groups that divide {cols} columns", codes, scale, zeros)
    layout = PackedIntLayout(TORCHAO, 4, None if groups == 1 else cols // groups, POINTS, dtype, scale.dtype)
    return Layer(stem + WEIGHT, (rows, cols), layout, {CODES: codes.name, SCALES: scale.name, ZEROS: zeros.name})


def _small(entries: Entries, stem: str, dtype: str, data: Mapping[str, Any]) -> Layer:
    """Return the layer of an MX format or NVFP4: floats of 4 or 8 bits with a small scale per 32 or 16 columns.

    The scales may be swizzled.
    """
    codes, scale = require_entries(entries, stem, (_QDATA, _SCALE), "torchao.parts").values()
    four = codes.dtype == "u8"
    second = stem + _SECOND in entries
    group = 32 if scale.dtype == POWERS else 16
    if scale.dtype not in (POWERS, "f8_e4m3fn") or codes.dtype not in ("u8", *FP8) or (group == 16 and not four):
        raise FormatError(
            "torchao.dtype", f"expected small floats and scales, found {codes.dtype} and {scale.dtype}", where=stem
        )
    rows, cols = (codes.shape[0], codes.shape[1] * (2 if four else 1)) if len(codes.shape) == 2 else (0, 0)
    if not rows or not cols or cols % group or data.get("block_size", group) != group:
        raise _shape_error(stem, f"a matrix with a scale for {group} columns", codes, scale)
    swizzled = bool(data.get("is_swizzled_scales"))
    grid = (rows, cols // group)
    stored_grid = tuple(-(-size // step) * step for size, step in zip(grid, _BLOCK, strict=True)) if swizzled else grid
    if scale.size != prod(stored_grid) or (not swizzled and scale.shape != grid):
        raise _shape_error(stem, f"{list(stored_grid)} scales", codes, scale)
    if second and (entries[stem + _SECOND].dtype != "f32" or entries[stem + _SECOND].size != 1):
        raise _shape_error(stem, "one second scale in f32", entries[stem + _SECOND])
    values = "f4_e2m1fn" if four else codes.dtype
    layout = ScaledCodebookLayout(
        4 if four else 8, Group(group), dtype, scales=scale.dtype, values=values, second=MULTIPLY if second else None
    )
    parts = {INDICES: codes.name, SCALES: scale.name} | ({SECOND: stem + _SECOND} if second else {})
    converters = {SCALES: partial(_unswizzle, rows=rows, groups=grid[1])} if swizzled else {}
    return Layer(stem + WEIGHT, (rows, cols), layout, parts, (), converters)


def _unswizzle(stored: bytes, rows: int, groups: int) -> bytes:
    """Return swizzled scales in row-major order.

    Swizzled scales are stored in blocks of 128 rows and 4 columns, in which rows with a distance of 32 are adjacent.
    """
    block_rows = -(-rows // _BLOCK[0])
    block_columns = -(-groups // _BLOCK[1])
    blocks = np.frombuffer(stored, np.uint8).reshape(block_rows, block_columns, 32, 4, 4)
    return blocks.transpose(0, 3, 2, 1, 4).reshape(128 * block_rows, 4 * block_columns)[:rows, :groups].tobytes()


def _shape_error(stem: str, expected: str, *tensors: Tensor) -> FormatError:
    shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return FormatError("torchao.shape", f"expected {expected}, found {shapes}", where=stem)


_ReadLayer = Callable[[Entries, str, str, Mapping[str, Any]], Layer]
_READERS: Mapping[str, _ReadLayer] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Int4Tensor": _int4,
    "Float8Tensor": _floats,
    "MXTensor": _small,
    "NVFP4Tensor": _small,
}
