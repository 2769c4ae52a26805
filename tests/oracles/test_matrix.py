"""Every family into every format: the table in spec/interop.md is what happens, and exact cells have equal values.

Values are decoded here by NumPy from the specifications, and where they are installed by the package gguf, by MLX and
by coremltools. Strangers read what SQUIZD and Squish's arrays take in ``tests/interop``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.model.layouts.ggml import TYPES
from ingot.model.tensor import Tensor
from tests.support.matrix import SHAPE, Found, explore, table
from tests.support.reference import ggml

from .common import Stored
from .weights import DECODERS

Array = np.ndarray[Any, np.dtype[Any]]
PAGE = Path(__file__).parents[2] / "spec" / "interop.md"


@pytest.fixture(scope="module")
def found() -> list[Found]:
    pytest.importorskip("gguf", reason="names of llama.cpp are those of the package gguf")
    return explore()


def test_the_page_says_what_happens(found: list[Found]) -> None:
    stated = re.search(r"<!-- matrix -->\n(.*?)\n<!-- /matrix -->", PAGE.read_text("utf-8"), re.DOTALL)
    assert stated is not None
    assert stated[1] == table(found), "python tools/interop_table.py"


def test_exact_cells_have_equal_values(found: list[Found]) -> None:
    known: dict[int, Array] = {}
    count = 0
    for item in found:
        if item.made is None or item.made is item.source:
            continue
        wanted = known.setdefault(id(item.source), reference(item.source))
        made = reference(item.made)
        made = made.T if item.target == "onnx MatMul" and item.made.shape != item.source.shape else made
        if item.rounded:
            assert not np.array_equal(made, wanted)
            made, wanted = made.astype(ml_dtypes.bfloat16), wanted.astype(ml_dtypes.bfloat16)
        assert np.array_equal(made, wanted), (item.family, item.what, item.group, item.target)
        count += 1
    assert count > 200


def test_the_package_gguf_decodes_equal_values(found: list[Found]) -> None:
    quants = pytest.importorskip("gguf.quants")
    types = pytest.importorskip("gguf").GGMLQuantizationType
    seen = set()
    for item in found:
        kind = item.made.params["type"].upper() if item.made is not None and item.target == "gguf" else None
        if item.made is None or kind is None or kind in (*seen, "Q2_0") or item.made is item.source:
            continue
        raw = np.frombuffer(item.made.parts["blocks"].view(), np.uint8).reshape(item.made.shape[0], -1)
        assert np.array_equal(quants.dequantize(raw, types[kind]), reference(item.source)), item
        seen.add(kind)
    assert seen >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4"}


def test_mlx_decodes_equal_values(found: list[Found]) -> None:
    """With scales in f32, as MLX rounds in the scales' type."""
    mx = pytest.importorskip("mlx.core")
    seen = set()
    for item in found:
        if item.made is None or item.target != "mlx" or (item.family, item.what) in seen or item.made is item.source:
            continue
        role = "packed_weight" if integers(item.made) else "indices"
        packed = mx.array(np.frombuffer(item.made.parts[role].view(), "<u4")).reshape(item.made.shape[0], -1)
        scales = item.made.parts["scales"].array().reshape(item.made.shape[0], -1)
        if integers(item.made):
            zeros = item.made.parts["zeros"].array().reshape(scales.shape)
            how = {"group_size": item.made.params["group_size"], "bits": item.made.params["bits"]}
            made = mx.dequantize(packed, mx.array(scales.astype("f4")), mx.array(zeros.astype("f4")), **how)
        else:
            eight, small = item.made.params["bits"] == 8, item.made.params["group_size"] == 16
            mode = "nvfp4" if small else "mxfp8" if eight else "mxfp4"
            made = mx.dequantize(packed, mx.array(scales), mode=mode, dtype=mx.float32)
        assert np.array_equal(np.array(made), reference(item.source)), (item.family, item.what)
        seen.add((item.family, item.what))
    assert len(seen) > 20


def test_mlx_computes_what_grades_say(found: list[Found]) -> None:
    """Where the type's grade is missing MLX rounds twice, and values differ; elsewhere its values are ours."""
    mx = pytest.importorskip("mlx.core")
    seen = set()
    for item in found:
        if item.made is None or item.target != "mlx" or item.made is item.source or not integers(item.made):
            continue
        scales, zeros = (mx.array(item.made.parts[role].array().reshape(SHAPE[0], -1)) for role in ("scales", "zeros"))
        packed = mx.array(np.frombuffer(item.made.parts["packed_weight"].view(), "<u4")).reshape(SHAPE[0], -1)
        how = {"group_size": item.made.params["group_size"], "bits": item.made.params["bits"]}
        made = np.array(mx.dequantize(packed, scales, zeros, **how))
        own = reference(item.source).astype(made.dtype)
        wide = made.dtype == np.float32
        assert ("type" in item.equal) == wide, (item.family, item.what)
        assert not wide or np.array_equal(made, own)
        seen.add((wide, bool(np.array_equal(made, own))))
    assert seen >= {(True, True), (False, False)}


@pytest.mark.slow  # that package takes long to import
def test_coremltools_decodes_equal_values(found: list[Found]) -> None:
    ios18 = pytest.importorskip("coremltools.converters.mil.mil.ops.defs.iOS18")
    seen = set()
    for item in found:
        if item.made is None or item.target != "coreml" or (item.family, item.what, item.group) in seen:
            continue
        bits, signed = item.made.params["bits"], item.made.params["signed"]
        codes = spread(np.frombuffer(item.made.parts["packed_weight"].view(), np.uint8).reshape(SHAPE[0], -1), bits)
        codes = codes - (codes >> (bits - 1) << bits) if signed else codes
        scales = item.made.parts["scales"].array().reshape(SHAPE[0], -1)
        points = np.full(scales.shape, item.made.params.get("zero_point", 0), scales.dtype)
        if "zeros" in item.made.parts:
            points = item.made.parts["zeros"].array().reshape(scales.shape)
        made = ios18.constexpr_blockwise_shift_scale.decompress(codes, scales, points)
        assert np.array_equal(made, reference(item.source).astype(scales.dtype)), (item.family, item.what, item.group)
        seen.add((item.family, item.what, item.group))
    assert len(seen) > 50


def integers(tensor: Tensor) -> bool:
    return tensor.codec == "affine"


def reference(tensor: Tensor) -> Array:
    """Decode in f32 by the specifications."""
    if tensor.codec == "ggml_blocks":
        kind = tensor.params["type"]
        raw = np.frombuffer(tensor.parts["blocks"].view(), np.uint8)
        return ggml.DECODERS[kind](raw.reshape(-1, TYPES[kind].nbytes)).reshape(tensor.shape)
    if tensor.codec == "affine_words":
        return words(tensor)
    parts = {role: (part.dtype, bytes(part.view())) for role, part in tensor.parts.items()}
    stored = Stored(tensor.shape, tensor.dtype, tensor.codec, dict(tensor.params), parts)
    return DECODERS[tensor.codec](stored, "f32").reshape(tensor.shape)


def words(tensor: Tensor) -> Array:
    """``s (q - z)`` from words of 32 bits, as spec/affine_words.md has them."""
    (rows, cols), params = tensor.shape, tensor.params
    form, bits = params["form"], params["bits"]
    columns = params.get("group_size", cols)
    groups = -(-cols // columns)
    turned = form in ("gptq", "gptq_v1", "gptq_planes", "awq")
    scales = tensor.parts["scales"].array().astype(np.float32).reshape((groups, rows) if turned else (rows, -1))
    scales = scales.T if turned else scales[:, :groups]
    stored = np.frombuffer(tensor.parts["packed_weight"].view(), np.uint8)
    codes = matrix(stored, form, bits, (rows, cols))
    middle = 0 if form in ("int_quantized", "modelopt_int4") else 1 << (bits - 1)
    points = np.full((rows, groups), params.get("zero_point", middle), np.int64)
    if "zeros" in tensor.parts:
        held = np.frombuffer(tensor.parts["zeros"].view(), np.uint8)
        if form in ("gptq", "gptq_v1"):
            points = spread(held.reshape(groups, -1), bits)[:, :rows].T + (form == "gptq_v1")
        elif form == "gptq_planes":
            points = planes(held.view("<u4").reshape(groups, -1), bits).T
        elif form == "awq_gemv":
            points = spread(held.reshape(rows, -1), 4)[:, :groups]
        elif form == "awq":
            points = spread(held.reshape(groups, -1), 4).reshape(groups, -1, 8)[:, :, ORDER].reshape(groups, rows).T
        elif form == "int_quantized":
            points = held.view(np.int8).reshape(rows, groups).astype(np.int64)
        else:
            across = held.view("<u4").reshape(-1, groups).T
            points = spread(np.ascontiguousarray(across).view(np.uint8), bits)[:, :rows].T
    difference = (codes - np.repeat(points, columns, 1)[:, :cols]).astype(np.float32)
    return np.repeat(scales, columns, 1)[:, :cols] * difference


ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of AWQ's words the columns 0 to 7 are


def matrix(stored: Array, form: str, bits: int, shape: tuple[int, int]) -> Array:
    rows, cols = shape
    if form == "int_quantized":
        return stored.view(np.int8).reshape(shape).astype(np.int64)
    if form == "modelopt_int4":
        two = np.stack([stored & 15, stored >> 4]).reshape(2, rows // 2, cols).transpose(1, 0, 2).reshape(shape)
        return (two.astype(np.int64) ^ 8) - 8
    if form == "awq":
        return spread(stored.reshape(cols, -1), 4).reshape(cols, -1, 8)[:, :, ORDER].reshape(cols, rows).T
    if form == "gptq_planes":
        return planes(np.ascontiguousarray(stored.view("<u4").reshape(-1, rows).T), bits)
    if form in ("gptq", "gptq_v1"):
        down = np.ascontiguousarray(stored.view("<u4").reshape(-1, rows).T)
        return spread(down.view(np.uint8), bits)[:, :cols]
    return spread(stored.reshape(rows, -1), bits)[:, :cols]


def planes(words: Array, bits: int) -> Array:
    """Codes of rows of words: for every 32 of them the low 4 (of 3 bits: 2), then what is left, 2 bits before 1."""
    blocks = words.reshape(len(words), -1, bits)
    codes, taken, at = np.zeros((len(words), blocks.shape[1], 32), np.int64), 0, 0
    while taken < bits:
        width = max(size for size in (4, 2, 1) if size <= bits - taken)
        plane = np.ascontiguousarray(blocks[:, :, at : at + width]).reshape(len(words), -1)
        codes |= spread(plane.view(np.uint8), width).reshape(codes.shape) << taken
        taken, at = taken + width, at + width
    return codes.reshape(len(words), -1)


def spread(packed: Array, bits: int) -> Array:
    """Codes of a bit stream a row, low bits first."""
    ones = np.unpackbits(packed, axis=1, bitorder="little")
    whole = ones[:, : ones.shape[1] // bits * bits].reshape(len(packed), -1, bits).astype(np.int64)
    return (whole << np.arange(bits)).sum(axis=2)
