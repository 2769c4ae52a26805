"""Profiles of the registry: what they are here, and that a reader of the document finds them as it wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.formats.zt2.manifest import Object
from ingot.formats.zt2.profiles import stored_form
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.rules import check_object
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.affine import (
    FLAT_LSB,
    NO_ZERO,
    OFFSETS,
    POINTS,
    ROW,
    ROWS_LSB,
    ROWS_MSB,
    AffineLayout,
    Blocks,
    Constant,
    Grid,
    Group,
    Zero,
)
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout, Tiles
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor

GROUP = Group(32)


def blocks(kind: str) -> Tensor:
    layout = GgmlBlocksLayout(kind)
    size = layout.part_specs((3, 512))[0].length or 0
    data = np.random.default_rng(1).integers(0, 60, size, np.uint8)
    return Tensor.from_parts(layout, {"blocks": data}, (3, 512))


def small(values: str, bits: int, factor: float | None = None, grid: Group | Tiles = GROUP) -> Tensor:
    layout = ScaledCodebookLayout(bits, grid, "f32", scales="f8_e8m0fnu", values=values, factor=factor)
    specs = layout.part_specs((4, 64))
    rng = np.random.default_rng(2)
    parts = {
        part.role: memory_part(rng.integers(100, 120, part.length or 0).astype(np.uint8), part.dtype, part.type)
        for part in specs
    }
    return Tensor.from_parts(layout, parts, (4, 64))


@pytest.mark.parametrize(
    ("tensor", "layout", "attributes"),
    [
        (blocks("q4_0"), "gguf.q4_0/1", {"elems_per_block": 32, "block_bytes": 18}),
        (blocks("q6_k"), "gguf.q6_k/1", {"elems_per_block": 256, "block_bytes": 210}),
        (small("f4_e2m1fn", 4), "zt.mx/1", {"axis": 1, "block_size": 32, "scale_form": "e8m0_exponent"}),
        (small("f8_e4m3fn", 8), "zt.mx/1", {"axis": 1, "block_size": 32, "scale_form": "e8m0_exponent"}),
        (
            small("f8_e4m3fn", 8, grid=Tiles(2, 1)),
            "zt.mx/1",
            {"axis": 0, "block_size": 2, "scale_form": "e8m0_exponent"},
        ),
        (small("f4_e2m1fn", 4, grid=Tiles(3, 1)), "ingot.scaled_codebook/1", None),
        (small("i8", 8, 2.0**-6), "zt.mx/1", {"axis": 1, "block_size": 32, "scale_form": "e8m0_exponent"}),
        (small("i8", 8), "ingot.scaled_codebook/1", None),
    ],
    ids=["q4_0", "q6_k", "mxfp4", "mxfp8", "columns", "columns-in-part", "mxint8", "i8-without-its-factor"],
)
def test_profiles_there_and_back(
    tmp_path: Path, tensor: Tensor, layout: str, attributes: dict[str, object] | None
) -> None:
    ingot.save(tmp_path / "a.zt", {"x": tensor})
    ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", container=2)
    ingot.convert(tmp_path / "b.zt", tmp_path / "c.zt")
    obj = read_manifest(MemorySource((tmp_path / "b.zt").read_bytes()))[1].objects["x"]
    assert obj.layout == layout
    assert attributes is None or obj.attributes == attributes
    with ingot.open(tmp_path / "b.zt") as two, ingot.open(tmp_path / "c.zt") as one:
        for found in (two["x"], one["x"]):
            assert found.layout == tensor.layout
            assert found.numpy().tobytes() == tensor.numpy().tobytes()


def integers(
    bits: int,
    zero: Zero,
    grid: Grid = GROUP,
    *,
    shape: tuple[int, int] = (8, 64),
    packing: str = ROWS_LSB,
    signed: bool = False,
    dtype: str = "f32",
) -> Tensor:
    layout = AffineLayout(bits, grid, packing, signed, zero, dtype, "f16")
    rng = np.random.default_rng(3)
    parts = {
        part.role: rng.integers(0, 256, part.length or 0, np.uint8)
        if part.dtype == "u8"
        else rng.uniform(0.5, 2, (part.length or 0) // 2).astype(np.float16)
        for part in layout.part_specs(shape)
    }
    return Tensor.from_parts(layout, parts, shape)


def grouped(
    group: int, axis: int, zero: dict[str, object], bits: int = 4, order: str = "lsb_first"
) -> dict[str, object]:
    packing = {"word": "u8", "order": order, "per_word": 8 // bits}
    own = {"bits": bits, "group_size": group, "axis": axis, "packing": packing}
    return {**own, "scale_form": "f32_factors", "zero_point": zero}


NONE, PLAIN = {"form": "none"}, {"form": "tensor", "packing": "plain"}
GROUPED = "zt.quant_group/1"


@pytest.mark.parametrize(
    ("tensor", "attributes"),
    [
        (integers(4, Constant(8)), grouped(32, 1, {"form": "implied", "value": 8})),
        (integers(2, POINTS, dtype="bf16"), {**grouped(32, 1, PLAIN, 2), "dtype": "bf16"}),
        (integers(8, NO_ZERO, ROW, signed=True), grouped(64, 1, NONE, 8)),
        (integers(4, POINTS, packing=ROWS_MSB), grouped(32, 1, PLAIN, order="msb_first")),
        (integers(4, NO_ZERO, Blocks((4, 1))), grouped(4, 0, NONE)),
        (integers(4, NO_ZERO, Group(3), shape=(8, 9), packing=FLAT_LSB), grouped(3, 1, NONE)),
        (integers(4, OFFSETS), None),
        (integers(4, NO_ZERO, signed=True), None),
        (integers(3, POINTS), None),
        (integers(4, NO_ZERO, Group(40)), None),  # the last group is shorter
        (integers(4, NO_ZERO, Group(64)), None),  # read as a scale per row, which it says as well
    ],
)
def test_affine_integers_there_and_back(tmp_path: Path, tensor: Tensor, attributes: dict[str, object] | None) -> None:
    layout = "ingot.affine/1" if attributes is None else GROUPED
    test_profiles_there_and_back(tmp_path, tensor, layout, attributes)
    if attributes is not None:
        data = (tmp_path / "b.zt").read_bytes()
        found = by_the_document(data, read_manifest(MemorySource(data))[1].objects["x"])
        np.testing.assert_array_equal(found.astype(tensor.numpy().dtype), tensor.numpy())


def by_the_document(data: bytes, obj: Object) -> np.ndarray[Any, Any]:
    """Decode by the profile's own words: ``value = (q - zero) * scale(g)``."""
    about, along = dict(obj.attributes), list(obj.shape)
    bits, axis, packing = about["bits"], about["axis"], about["packing"]
    along[axis] //= about["group_size"]

    def part(role: str, dtype: str) -> np.ndarray[Any, Any]:
        start, length = obj.parts[role].blob
        return np.frombuffer(data[start : start + length], dtype)

    places = np.arange(0, 8, bits)[:: 1 if packing["order"] == "lsb_first" else -1]
    words = part("data", "u1")[:, None]
    codes = (words >> places & (1 << bits) - 1).reshape(obj.shape).astype(np.int64)
    codes = codes.astype(np.int8) if obj.parts["data"].dtype == "i8" else codes
    zero = about["zero_point"].get("value", 0)
    if about["zero_point"]["form"] == "tensor":
        zero = part("zeros", "f2").reshape(along).repeat(about["group_size"], axis).astype(np.float32)
    scales = part("scales", "f2").reshape(along).repeat(about["group_size"], axis).astype(np.float32)
    return (codes.astype(np.float32) - np.float32(zero)) * scales


def part(dtype: str, nbytes: int, at: int = 0, kind: str | None = None) -> dict[str, object]:
    return {"dtype": dtype, "blob": [4096 + 65536 * at, nbytes], **({"type": kind} if kind else {})}


def group_object(attributes: dict[str, object], zeros: dict[str, object] | None = None, **more: object) -> Object:
    parts = {"data": part("u8", 128), "scales": part("f16", 16, 1), **({} if zeros is None else {"zeros": zeros})}
    entry = {"shape": [4, 64], "layout": GROUPED, "attributes": attributes, "parts": {**parts, **more}}
    return msgspec.convert(entry, Object)


POINTED = AffineLayout(4, Group(32), ROWS_LSB, False, POINTS, "f32", "f16")
WORDS = {"word": "u32", "order": "lsb_first", "per_word": 8}


@pytest.mark.parametrize(
    ("obj", "layout"),
    [
        (
            group_object(
                {**grouped(32, 1, NONE), "packing": WORDS, "scale_form": "f16_factors"}, data=part("u32", 128)
            ),
            AffineLayout(4, Group(32), ROWS_LSB, False, NO_ZERO, "f16", "f16"),
        ),
        (
            group_object(grouped(0, 0, NONE, 8), data=part("i8", 256), scales=part("f16", 8)),
            AffineLayout(8, ROW, ROWS_LSB, True, NO_ZERO, "f32", "f16"),
        ),
        (
            group_object({**grouped(32, 1, NONE), "packing": {**WORDS, "order": "msb_first"}}, data=part("u32", 128)),
            AffineLayout(4, Group(32), ROWS_MSB, False, NO_ZERO, "f32", "f16"),
        ),
        (group_object({**grouped(32, 1, NONE), "packing": WORDS}, data=part("i32", 128)), None),  # signed codes?
        (
            group_object({**grouped(32, 1, {"form": "implied", "value": 8}), "packing": WORDS}, data=part("i32", 128)),
            AffineLayout(4, Group(32), ROWS_LSB, False, Constant(8), "f32", "f16"),
        ),
        (group_object(grouped(32, 1, {"form": "tensor", "packing": "same_as_data"}), zeros=part("u8", 4)), POINTED),
        (group_object(grouped(32, 1, PLAIN), zeros=part("u8", 8)), POINTED),
        (group_object(grouped(32, 1, PLAIN), zeros=part("u8", 8, 2, "f8_e5m2fnuz")), None),
        (group_object(grouped(32, 1, {"form": "implied", "value": 16})), POINTED),
        (group_object(grouped(32, 1, {"form": "implied", "value": 2049})), None),  # no number of f16
        (
            group_object({**grouped(32, 1, NONE), "scale_form": "e8m0_exponent"}, scales=part("u8", 8, 1, "f8_e8m0")),
            AffineLayout(4, Group(32), ROWS_LSB, False, NO_ZERO, "f32", "f32"),
        ),
        (group_object({**grouped(32, 1, NONE), "scale_form": "f16_factors"}, scales=part("f32", 32, 1)), None),
    ],
)
def test_affine_integers_of_others(obj: Object, layout: AffineLayout | None) -> None:
    """What the document says in full is decoded, anything else listed; parts are as the codec has them."""
    check_object("x.zt", "t", obj)
    found = stored_form(obj)
    if layout is None:
        assert found.codec == GROUPED
    else:
        assert found.attributes == layout.attributes()
        sizes = {spec.role: (spec.dtype, spec.length) for spec in layout.part_specs(tuple(obj.shape))}
        assert all((made.dtype, made.nbytes) == sizes[role] for role, made in found.converted.items())


def test_zero_points_that_no_float_is_are_refused() -> None:
    """Of integers that scales' type has not, once they are read."""
    made = stored_form(group_object(grouped(32, 1, PLAIN), zeros=part("i32", 32))).converted["zeros"]
    assert np.frombuffer(made.make(np.array([2048, -3], "<i4").tobytes()), "<f2").tolist() == [2048, -3]
    for value in (2049, 1 << 30, -(1 << 31)):
        with pytest.raises(IngotError) as caught:
            made.make(np.array([value], "<i4").tobytes())
        assert caught.value.rule == "zt2.zero-point"


@pytest.mark.parametrize(
    ("change", "more", "rule"),
    [
        ({"bits": 3}, {}, "zt2.layout"),
        ({"packing": {**WORDS, "per_word": 7}}, {}, "zt2.layout"),
        ({"packing": None}, {}, "zt2.layout"),
        ({"packing": WORDS}, {}, "zt2.layout"),
        ({"axis": 2}, {}, "zt2.layout"),
        ({"group_size": 24}, {}, "zt2.layout"),
        ({"zero_point": PLAIN}, {}, "zt2.layout"),
        ({"scale_form": "x"}, {}, "zt2.layout"),
        ({"zero_point": {"form": "implied"}}, {}, "zt2.layout"),
        ({}, {"scales": part("i8", 8)}, "zt2.layout"),
        ({}, {"data": part("u8", 127)}, "zt2.size"),
        ({}, {"scales": part("f16", 18)}, "zt2.size"),
        ({"zero_point": PLAIN}, {"zeros": part("f16", 18)}, "zt2.size"),
        ({"zero_point": {"form": "tensor", "packing": "same_as_data"}}, {"zeros": part("u8", 5)}, "zt2.size"),
    ],
)
def test_rules_of_affine_integers(change: dict[str, object], more: dict[str, object], rule: str) -> None:
    obj = group_object({**grouped(32, 1, NONE), **change}, **more)
    with pytest.raises(IngotError) as caught:
        check_object("x.zt", "t", obj)
    assert caught.value.rule == rule


PART = {"dtype": "u8", "blob": [4096, 36]}


@pytest.mark.parametrize(
    ("shape", "layout", "attributes", "parts", "rule"),
    [
        ([64], "gguf.q4_0/1", {"elems_per_block": 32}, {"data": PART}, "zt2.layout"),
        ([64], "gguf.q4_0/1", {"elems_per_block": 0, "block_bytes": 18}, {"data": PART}, "zt2.layout"),
        ([65], "gguf.q4_0/1", {"elems_per_block": 32, "block_bytes": 18}, {"data": PART}, "zt2.layout"),
        ([96], "gguf.q4_0/1", {"elems_per_block": 32, "block_bytes": 18}, {"data": PART}, "zt2.size"),
        ([72], "zt.mx/1", {"block_size": 32, "scale_form": "e8m0_exponent"}, {"data": PART}, "zt2.layout"),
    ],
)
def test_metadata_rules(
    shape: list[int], layout: str, attributes: dict[str, object], parts: dict[str, object], rule: str
) -> None:
    entry = {"shape": shape, "layout": layout, "attributes": attributes, "parts": parts}
    with pytest.raises(IngotError) as caught:
        check_object("x.zt", "t", msgspec.convert(entry, Object))
    assert caught.value.rule == rule


def test_blocks_of_another_size_are_not_decoded() -> None:
    about = {"shape": [64], "layout": "gguf.q4_0/1", "attributes": {"elems_per_block": 64, "block_bytes": 36}}
    obj = msgspec.convert({**about, "parts": {"data": PART}}, Object)
    check_object("x.zt", "t", obj)
    assert stored_form(obj).codec == "gguf.q4_0/1"
