"""The codec sparse_patch: every type and bit pattern, any runs of rows, both encodings, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.delta.base import delta_codec
from ingot.codecs.delta.sparse_patch import SparsePatchDelta
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import bits, chunks
from tests.support.strategies import arrays, shapes

TYPES = tuple(row.name for row in DTYPES.values() if row.bits >= 8 and row.category != "c")
CODEC = SparsePatchDelta()


def encode(base: Array, tuned: Array, dtype: str, cuts: tuple[int, ...] = ()) -> Tensor:
    """Return the patch between two arrays as a tensor in memory, encoded in chunks of rows."""
    shape = base.shape
    encoder = CODEC.encoder(shape, dtype, {})
    cols = shape[-1] if shape else 1
    old, new = base.reshape(-1, max(cols, 1)), tuned.reshape(-1, max(cols, 1))
    found = [encoder.encode(old[piece], new[piece], piece.start) for piece in chunks(len(old), cuts)]
    parts = {}
    for spec in encoder.parts:
        parts[spec.role] = memory_part(np.concatenate([one[spec.role] for one in found]), spec.dtype, spec.type)
        assert parts[spec.role].length <= spec.at_most
    return Tensor("tensor", shape, dtype, encoder.codec, parts, dict(encoder.params), CODECS[encoder.codec])


def patch(positions: list[int], index: str = "i32", encoding: str = "raw", **changes: Any) -> Tensor:
    """A patch of a vector of ten 16-bit integers that puts 100, 101, ... at positions."""
    values = np.arange(100, 100 + len(positions)).astype(np.int16)
    parts = {
        "indices": memory_part(np.array(positions, numpy_dtype(index)), index),
        "values": memory_part(values, "i16"),
    }
    flat = changes.pop("flat", False)
    params = {"encoding": encoding, "flat": flat}
    tensor = Tensor("t", (len(positions),) if flat else (10,), "i16", "sparse_patch", parts, params)
    return replace(tensor, **changes)


def apply(tensor: Tensor, base: Array, cuts: tuple[int, ...] = (), *, in_place: bool = False) -> Array:
    """Apply in runs of elements that are cut anywhere."""
    rows = base.reshape(-1, 1).copy()
    out = rows if in_place else np.empty_like(rows)
    applier = CODEC.applier(tensor, tensor.dtype)
    for piece in chunks(len(rows), cuts):
        applier.apply(rows[piece], out[piece])
    applier.finish()
    return out.reshape(base.shape)


@given(st.data(), st.sampled_from(TYPES), shapes(max_dims=3), st.lists(st.integers(0, 700), max_size=3))
def test_every_type_and_bit_pattern_comes_back(data: Any, dtype: str, shape: tuple[int, ...], cuts: list[int]) -> None:
    base = data.draw(arrays(shape, dtype))
    tuned = np.where(data.draw(arrays(shape, "bool")), data.draw(arrays(shape, dtype)), base).astype(base.dtype)
    tensor = encode(base, tuned, dtype, tuple(cuts))
    CODEC.check(tensor)
    assert tensor.parts["indices"].nbytes <= 4 * tuned.size
    assert bits(apply(tensor, base, tuple(cuts))) == bits(tuned)
    assert bits(apply(tensor, base, in_place=True)) == bits(tuned)


def test_only_bits_that_differ_are_stored() -> None:
    """Minus zero is not zero, one NaN is not another, and a NaN is itself."""
    base = np.array([0.0, np.nan, np.nan, 1.0], np.float32)
    tuned = np.array([-0.0, np.nan, np.nan, 1.0], np.float32)
    tuned.view(np.uint32)[2] ^= 1
    tensor = encode(base, tuned, "f32")
    assert tensor.parts["indices"].array().tolist() == [0, 2]
    assert bits(apply(tensor, base)) == bits(tuned)


def test_rebuild_and_a_count_that_is_known() -> None:
    base, tuned = np.zeros((2, 3), np.float16), np.eye(2, 3, dtype=np.float16)
    encoder = CODEC.encoder((2, 3), "f16", {"count": 2})
    assert [part.length for part in encoder.parts] == [8, 4]
    parts, out = encoder.encode(base, tuned), np.empty_like(base)
    encoder.rebuild(parts, base, out)
    assert bits(out) == bits(tuned)
    assert CODEC.encoder((2**16, 2**15), "f16", {}).parts[0].dtype == "i64"


@pytest.mark.parametrize("index", ["u16", "u32"])
def test_gaps_are_elements_between(index: str) -> None:
    found = apply(patch([0, 2, 0, 4], index, "gap_delta"), np.zeros(10, np.int16), (3, 4))
    assert found.tolist() == [100, 0, 0, 101, 102, 0, 0, 0, 0, 103]


def test_gaps_end_inside() -> None:
    assert apply(patch([9], "u16", "gap_delta"), np.zeros(10, np.int16)).tolist() == [*[0] * 9, 100]


def test_many_pieces_of_positions() -> None:
    base = np.zeros(300_000, np.int16)
    tuned = base.copy()
    tuned[::2] = 7
    tensor = encode(base, tuned, "i16")
    assert bits(apply(tensor, base, (1, 131_072, 131_073, 299_999))) == bits(tuned)


def test_a_patch_without_a_shape_fits_whatever_holds_it() -> None:
    tensor = patch([1, 9], flat=True)
    assert CODEC.fits(tensor, (10,))
    assert CODEC.fits(tensor, (2, 5))
    assert not CODEC.fits(tensor, (1,))
    assert CODEC.fits(patch([1]), (10,))
    assert not CODEC.fits(patch([1]), (2, 5))
    assert apply(tensor, np.zeros(10, np.int16)).tolist() == [0, 100, *[0] * 7, 101]


@pytest.mark.parametrize(
    ("rule", "tensor"),
    [
        ("order", patch([3, 2])),
        ("order", patch([3, 3])),
        ("order", patch([2, 5, 5], "i64", flat=True)),
        ("index", patch([-1])),
        ("index", patch([10])),
        ("index", patch([2**40], "i64")),
        ("index", patch([-(2**40)], "i64", flat=True)),
        ("index", patch([4, 10], flat=True)),
        ("index", patch([10], "u16", "gap_delta")),
        ("index", patch([2**32 - 1, 2**32 - 1], "u32", "gap_delta")),
        ("index", patch([2**32 - 1, 2**32 - 1], "u32", "gap_delta", flat=True)),
    ],
)
def test_positions_that_do_not_ascend_inside_are_refused(rule: str, tensor: Tensor) -> None:
    base = np.zeros(10, np.int16)
    for cuts in ((), (1, 4, 9)):
        with pytest.raises(CodecError) as caught:
            apply(tensor, base, cuts)
        assert caught.value.rule == f"sparse_patch.{rule}"


def wrong() -> list[tuple[str, Tensor]]:
    fine = patch([1, 2])
    indices, values = fine.parts["indices"], fine.parts["values"]
    cut = memory_part(np.zeros(7, np.uint8), "u8")
    short = Part("i32", 7, cut.source)
    return [
        ("params", replace(fine, params={})),
        ("params", replace(fine, params={"encoding": "nvcomp_cascaded", "flat": False})),
        ("params", replace(fine, params={"encoding": ["raw"], "flat": False})),
        ("params", replace(fine, params={"encoding": "raw", "flat": 1})),
        ("parts", replace(fine, parts={"indices": indices})),
        ("parts", replace(fine, parts={**fine.parts, "more": values})),
        ("dtype", patch([1], "u32")),
        ("dtype", patch([1], "i32", "gap_delta")),
        ("dtype", replace(fine, dtype="u16")),
        ("dtype", replace(fine, dtype="f4_e2m1fn")),
        ("size", replace(fine, parts={"indices": indices, "values": memory_part(np.zeros(3, np.int16), "i16")})),
        ("size", replace(fine, parts={"indices": short, "values": values})),
        ("size", patch(list(range(11)))),
        ("size", patch([1, 2], flat=True, shape=(3,))),
    ]


@pytest.mark.parametrize(("rule", "tensor"), wrong())
def test_what_does_not_fit_together_is_refused(rule: str, tensor: Tensor) -> None:
    for check in (CODEC.check, CODECS["sparse_patch"].check, lambda one: CODEC.applier(one, one.dtype)):
        with pytest.raises(CodecError) as caught:
            check(tensor)
        assert caught.value.rule == f"sparse_patch.{rule}"
        assert caught.value.where


def test_another_base_and_a_use_without_one_are_refused() -> None:
    tensor, codec = patch([1]), CODECS["sparse_patch"]
    calls = [
        lambda: CODEC.applier(tensor, "bf16"),
        lambda: CODEC.applier(tensor, "i16").apply(np.zeros(3, np.float16), np.zeros(3, np.float16)),
        lambda: CODEC.applier(tensor, "i16").apply(np.zeros(3, np.int16), np.zeros(4, np.int16)),
        lambda: codec.decode(tensor, "i16"),
        lambda: codec.reader(tensor),
        lambda: codec.encoder((3,), "i16", {}),
    ]
    for call in calls:
        with pytest.raises(IngotError) as caught:
            call()
        assert caught.value.rule == "sparse_patch.base"


@pytest.mark.parametrize("options", [{"share": 1}, {"count": -1}, {"count": 11}, {"count": True}, {"count": "all"}])
def test_options_that_are_not_known_or_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((10,), "f32", options)
    assert caught.value.rule == "sparse_patch.option"


@pytest.mark.parametrize("dtype", ["f4_e2m1fn", "complex64", "complex128"])
def test_elements_that_are_no_words_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODEC.encoder((8,), dtype, {})
    assert caught.value.rule == "sparse_patch.dtype"


def test_it_is_found_by_its_name() -> None:
    codec = delta_codec("sparse_patch")
    assert (codec.id, codec.exact, codec.elementwise) == ("sparse_patch", True, True)
