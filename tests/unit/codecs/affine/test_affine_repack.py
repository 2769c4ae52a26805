"""Layouts of the same integers: which there are, in which order, and their bytes by hand."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.offset import offsets
from ingot.codecs.affine.rows import align_rows, join_rows
from ingot.codecs.base import Repacked
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.engine.steps import Repack
from ingot.engine.work import ChunkBudget
from ingot.model.layouts.affine import NO_ZERO, POINTS, Constant
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import encode_tensor, repacked, repacks

CODEC = AffineCodec()


def tensor(shape: tuple[int, int], packed: Array, zeros: Array | None = None, **changes: Any) -> Tensor:
    params = {"codec_version": 1, "bits": 4, "granularity": "row", "axis": -1, "packing": "rows_lsb"}
    params |= {"signed": False, "zeros": zeros is not None, "dtype": "f32", **changes}
    count = {"tensor": 1, "row": shape[0], "group": 0 if shape[1] == 0 else shape[0]}[params["granularity"]]
    scales = np.ones(count, np.float16)
    parts = {"packed_weight": memory_part(packed, "u8"), "scales": memory_part(scales, "f16")}
    if zeros is not None:
        parts["zeros"] = memory_part(zeros.astype(np.float16), "f16")
    return Tensor("tensor", shape, "f32", "affine", parts, params, CODEC)


def the(source: Tensor, **wanted: Any) -> Repacked:
    """The one layout with zero points, these attributes and the scales' type."""
    (found,) = [
        repack
        for repack in repacks(CODEC, source)
        if "zero_kind" not in repack.layout.attributes()
        and all(repack.layout.attributes()[key] == value for key, value in wanted.items())
        and repack.layout.scales == "f16"
        and (repack.layout.zeros or repack.exact)
    ]
    return found


def test_bytes_by_hand() -> None:
    """Unsigned 0 1 2 / 3 4 5 / 6 7 15, spare nibbles F: signed without padding, then in rows again."""
    packed = np.array([0x10, 0xF2, 0x43, 0xF5, 0x76, 0xFF], np.uint8)
    source = tensor((3, 3), packed, np.array([8, 0, 3]))
    flat = repacked(the(source, signed=True, packing="flat_lsb"), source)
    assert bytes(flat.parts["packed_weight"].view()).hex() == "98badcfe07"
    assert flat.parts["zeros"].array().tolist() == [0, -8, -5]
    assert flat.numpy().tolist() == [[-8, -7, -6], [3, 4, 5], [3, 4, 12]]
    back = repacked(the(flat, signed=False, packing="rows_lsb"), flat)
    assert bytes(back.parts["packed_weight"].view()).hex() == "10024305760f"
    assert back.parts["zeros"].array().tolist() == [8, 0, 3]


def test_codes_without_zero_points_get_them_where_their_sign_changes() -> None:
    source = tensor((1, 2), np.array([0x8F], np.uint8))
    repack = the(source, signed=True)
    assert repack.layout.attributes()["zeros"] is True
    other = repacked(repack, source)
    assert other.parts["zeros"].array().tolist() == [-8]
    assert other.numpy().tolist() == source.numpy().tolist() == [[15, 8]]
    same = the(source, signed=False)
    assert same.layout.attributes()["zeros"] is False
    assert set(repacked(same, source).parts) == {"packed_weight", "scales"}


def test_one_zero_point_for_all_codes_becomes_a_part() -> None:
    source = tensor((1, 2), np.array([0x8F], np.uint8), zero_point=7)
    other = repacked(the(source, signed=True), source)
    assert other.parts["zeros"].array().tolist() == [7 - 8]
    assert other.numpy().tolist() == source.numpy().tolist() == [[8, 1]]


def test_whole_bytes_from_the_highest_bit_on_change_their_sign() -> None:
    """They lie the same either way, in memory that is the caller's."""
    source = tensor((1, 2), np.array([0x05, 0xFF], np.uint8), bits=8, packing="rows_msb")
    other = repacked(the(source, signed=True), source)
    assert bytes(other.parts["packed_weight"].view()).hex() == "857f"
    assert bytes(source.parts["packed_weight"].view()).hex() == "05ff"
    assert other.numpy().tolist() == source.numpy().tolist() == [[5, 255]]


def test_what_is_nearest_to_as_stored_comes_first() -> None:
    source = tensor((3, 3), np.zeros(6, np.uint8), np.zeros(3), packing="rows_msb")
    others = repacks(CODEC, source)
    assert [repack.layout.attributes().get("zero_kind") for repack in others] == [None] * 6 + ["offset"] * 2 + [
        None
    ] * 5
    found = [
        (repack.layout.attributes()["signed"], repack.layout.attributes()["packing"], repack.layout.scales)
        for repack in others[:6]
    ]
    assert found == [
        (False, "rows_lsb", "f16"),
        (False, "flat_lsb", "f16"),
        (True, "rows_lsb", "f16"),
        (True, "flat_lsb", "f16"),
        (True, "rows_lsb", "f32"),
        (True, "flat_lsb", "f32"),
    ]
    assert [repack.layout.zero for repack in others[8:]] == [Constant(8), NO_ZERO, Constant(8), POINTS, NO_ZERO]
    assert [repack.layout.scales for repack in others[8:]] == ["f16"] * 2 + ["f32"] * 3  # one type, as ONNX has


@pytest.mark.parametrize("granularity", ["group", "row", "tensor"])
def test_any_number_of_empty_rows_takes_no_time(granularity: str) -> None:
    group = {"group_size": 4} if granularity == "group" else {}
    count = 1000 if granularity == "row" else 2**60
    source = tensor((count, 0), np.empty(0, np.uint8), None, granularity=granularity, **group)
    repack = the(source, signed=True)
    assert repack.rows == (1000 if granularity == "row" else 0)
    other = repacked(repack, source)
    CODEC.check(other)
    assert other.parts["zeros"].array().tolist() == [-8] * {"group": 0, "row": 1000, "tensor": 1}[granularity]


@pytest.mark.parametrize("row_bits", [1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 21, 33])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 40])
def test_rows_join_and_part_again(row_bits: int, count: int) -> None:
    stream = np.random.default_rng(row_bits).integers(0, 2, count * row_bits).astype(np.uint8)
    rows = np.packbits(stream.reshape(count, row_bits), axis=1, bitorder="little")
    joined = join_rows(rows, row_bits)
    assert bytes(joined) == np.packbits(stream, bitorder="little").tobytes()
    assert bytes(align_rows(joined, 0, (count, row_bits))) == rows.tobytes()


def test_a_zero_point_that_doubles_cannot_shift_is_not_exact() -> None:
    """2^58 and 2^58 + 8 are the same double: both tests of a shift would pass."""
    source = tensor((1, 2), np.array([0x10], np.uint8))
    for zero, shifts in ((8.0, True), (2.0**16, True), (2.0**45, False), (2.0**58, False)):
        part = memory_part(np.array([zero], np.float32), "f32")
        parts = {**source.parts, "scales": memory_part(np.ones(1, np.float32), "f32"), "zeros": part}
        one = replace(source, params={**source.params, "zeros": True}, parts=parts)
        found = [repack.exact for repack in repacks(CODEC, one) if repack.layout.signed and repack.layout.zeros]
        assert found
        assert set(found) == {shifts}


def test_scales_whose_products_leave_float32_have_no_offsets() -> None:
    zeros = np.full(1, 8, numpy_dtype("bf16"))
    for exponent, fits in ((0, True), (117, True), (118, False), (120, False)):
        assert (offsets(np.full(1, 2.0**exponent, zeros.dtype), zeros) is not None) == fits
    odd = np.array([1 + 2.0**-10], np.float16)
    assert offsets(odd, np.array([3], np.float16)) is None  # the product needs more bits than f16 has
    assert offsets(odd, np.array([4], np.float16)) is not None


def test_a_tiny_zero_point_is_not_none() -> None:
    """2^-80 more than the point that all codes would have is lost in a sum; it counts times a large scale."""
    codes, numbers = memory_part(np.zeros(1, np.uint8), "u8"), np.array([3e38, 2.0**-80], np.float32)
    parts = {
        "packed_weight": codes,
        "scales": memory_part(numbers[:1], "f32"),
        "zeros": memory_part(numbers[1:], "f32"),
    }
    source = replace(tensor((1, 1), np.zeros(1, np.uint8), np.zeros(1), signed=True), parts=parts)
    found = [repack for repack in repacks(CODEC, source) if isinstance(repack.layout.zero, Constant)]
    assert found
    assert not any(repack.exact for repack in found)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_words_take_little_more_memory_than_the_result(form: str) -> None:
    """Words that hold several rows are made of all of them: that has to fit beside a ceiling on memory."""
    shape, codes = (8192, 1024), np.zeros((8192, 512), np.uint8)
    source = tensor(shape, codes, granularity="group", group_size=1024, zero_point=8)
    ways = (CODEC.repack(source, layout) for layout in alternatives(source.layout, source))
    way = next(way for way in ways if getattr(way.layout, "packing", "") == form and way.exact)
    whole = sum(part.length or 0 for part in way.parts)
    assert way.memory * way.rows + way.extra_memory < 3 * whole
    tracemalloc.start()
    try:
        repacked(way, source)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used < way.memory * way.rows + way.extra_memory + 4 * whole  # the test gathers and joins the parts


@pytest.mark.parametrize("form", ["gptq_v1", "awq", "gptq_planes"])
@pytest.mark.parametrize("group", [None, 32, 96])
@pytest.mark.parametrize("points", [False, True])
def test_words_of_some_columns_after_others(form: str, group: int | None, points: bool) -> None:
    """A ceiling on memory below what all columns take cuts the result where a word and a group begin."""
    bits, shape = 3 if form == "gptq_planes" else 4, (96, 288)
    rng = np.random.default_rng(0)
    options = {"bits": bits, "group": group or "row", "symmetric": not points, "signed": False, "scales": "f16"}
    values = rng.standard_normal(shape).astype(np.float32)
    source = encode_tensor(
        CODEC, values, options if points else {**options, "zero_point": 1 << (bits - 1)}, dtype="f32"
    )
    layout = PackedIntLayout(form, bits, group, POINTS if points else Constant(1 << (bits - 1)), "f32")
    way = CODEC.repack(source, layout)
    if not way.exact:  # zero points of 0, which v1 has not
        assert (form, points) == ("gptq_v1", True)
        way = CODEC.repack(source, replace(layout, packing="gptq"))
    assert way.rows == 288 // (group or 32)
    whole = repacked(way, source)
    cut = repacked(way, source, range(1, way.rows, 2))
    assert {role: bytes(part.view()) for role, part in cut.parts.items()} == {
        role: bytes(part.view()) for role, part in whole.parts.items()
    }
    assert np.array_equal(CODECS[layout.codec].decode(cut, "f32"), CODEC.decode(source, "f32"))
    step = Repack(source, source.spec, rule="", repack=way)
    for budget in (1 << 20, way.extra_memory + way.memory):
        chunking = step.plan_chunks(ChunkBudget(budget, 4))
        assert chunking.cost <= budget
    assert chunking.chunk_rows == 1
