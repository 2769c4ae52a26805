"""``palette``: the suite's promises, codebooks that are the best there are, layouts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from ingot.codecs.palette.codec import PaletteCodec
from ingot.codecs.palette.fit import Histogram, assign, entries_of
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_parts, encode_tensor, read_rows
from tests.support.reference import palette as reference

CODEC = PaletteCodec()
CASES = (
    Case((), "f32"),
    Case((0,), "f16"),
    Case((0, 3), "bf16"),
    Case((3, 0), "f16", {"bits": 2}),
    Case((0, 3, 2), "f16", {"group": 2}),
    Case((4, 0, 2), "f16", {"group": 2, "entries": "i8"}),
    Case((7,), "f16", {"bits": 3}),
    Case((12,), "bf16", {"group": 3, "bits": 2}),
    Case((5, 7), "f32"),
    Case((5, 7), "f64", {"bits": 6}),
    Case((40, 33), "f16", {"bits": 1}),
    Case((40, 33), "f16", {"bits": 3}),
    Case((40, 33), "bf16", {"bits": 8}),
    Case((12, 9), "f16", {"group": 2, "bits": 2}),
    Case((12, 9), "f32", {"group": 3, "bits": 3, "entries": "i8"}),
    Case((12, 10), "bf16", {"group": 2, "axis": 1, "bits": 2, "entries": "bf16"}),
    Case((8, 3, 2, 5), "f16", {"group": 2, "bits": 4}),
    Case((4, 6, 3), "f16", {"group": 2, "axis": 1, "bits": 4, "entries": "f32"}),
    Case((8, 10), "f16", {"vector": 2, "bits": 4}),
    Case((8, 12), "f32", {"vector": 4, "bits": 3, "vector_axis": 1}),
    Case((8, 12), "f64", {"vector": 4, "bits": 3, "vector_axis": -1, "entries": "f32"}),
    Case((8, 3, 4), "bf16", {"vector": 2, "group": 4, "bits": 2}),
    Case((4, 6, 4), "f16", {"vector": 2, "vector_axis": 1, "bits": 6}),
    Case((6, 8), "f16", {"vector": 4, "vector_axis": 1, "group": 2, "bits": 1, "entries": "i8", "scales": "f32"}),
    Case((6, 4), "f16", {"importance": [1.0, 0.0, 3.0, 2.5], "bits": 2}),
    Case((6, 4), "f32", {"importance": [1.0, 0.0, 3.0, 2.5], "bits": 2, "group": 2}),
)


class TestPalette(CodecSuite):
    codec = CODEC
    cases = CASES

    def check_loss(self, case: Case, source: Array, decoded: Array) -> None:
        if "importance" in case.options:
            return
        values = source.astype(np.float64)
        distinct = len(np.unique(values))
        if distinct <= 2 ** case.options.get("bits", 4) and case.options.get("entries", "f16") == case.dtype:
            assert np.array_equal(values, decoded)  # as many entries as values
        room = float(np.ptp(values) + np.abs(values).max() / 64) if values.size else 0.0  # entries are rounded
        assert (np.abs(values - decoded) <= room).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_is_the_reference(case: Case) -> None:
    rng = np.random.default_rng(prod(case.shape))
    values = np.asarray(rng.normal(0, 1, case.shape)).astype(numpy_dtype(case.dtype))
    tensor = encode_tensor(CODEC, values, case.options, dtype=case.dtype)
    arrays = {role: part.array() for role, part in tensor.parts.items()}
    wanted = reference.decode(arrays, dict(tensor.params), tensor.shape)
    for dtype in ("f32", "f16", "bf16"):
        assert bits(tensor.numpy(dtype)) == bits(wanted.astype(numpy_dtype(dtype)))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sizes_are_those_of_the_formula(width: int, dtype: str) -> None:
    weights = np.random.default_rng(0).normal(0, 1, (24, 17)).astype(numpy_dtype(dtype))
    tensor = encode_tensor(CODEC, weights, {"bits": width, "group": 8}, dtype=dtype)
    assert tensor.nbytes == -(-24 * 17 * width // 8) + 3 * 2**width * 2


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_codebooks_have_the_least_squared_error(dtype: str, width: int) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        values = np.round(rng.normal(0, 3, int(rng.integers(2, 24))), seed % 3).astype(numpy_dtype(dtype))
        weights = rng.integers(1, 5, values.size).astype(np.float64)
        histogram = Histogram(dtype, float(np.abs(values.astype(np.float64)).max()))
        assert histogram.add(values.reshape(1, -1), weights) == values.size
        found = histogram.centroids(2**width)
        error = (weights * ((values.astype(np.float64)[:, None] - found) ** 2).min(axis=1)).sum()
        assert error == pytest.approx(reference.least_error(values, weights, 2**width), rel=1e-9, abs=1e-12)


def test_few_values_survive() -> None:
    for dtype in ("f16", "bf16"):
        some = np.random.default_rng(1).normal(0, 1e-3, 16).astype(numpy_dtype(dtype))
        values = some[np.random.default_rng(2).integers(0, 16, (9, 31))]
        assert bits(encode_tensor(CODEC, values, {"entries": dtype}, dtype=dtype).numpy()) == bits(values)


def test_values_far_apart_in_size_survive() -> None:
    values = np.array([[1e-30, 1.0, -2e30, 3e-20]], numpy_dtype("bf16"))
    assert bits(encode_tensor(CODEC, values, {"bits": 2, "entries": "bf16"}, dtype="bf16").numpy()) == bits(values)


def test_importance_moves_entries() -> None:
    values = np.array([[0.0, 1.0, 10.0], [0.5, 1.5, 11.0]], np.float32)
    plain, bent = (
        encode_tensor(CODEC, values, {"bits": 1, "entries": "f32", **more}, dtype="f32").numpy()
        for more in ({}, {"importance": [100.0, 100.0, 1e-6]})
    )
    assert ((values - plain)[:, 2] ** 2).sum() < 1 < ((values - bent)[:, 2] ** 2).sum()
    assert ((values - bent)[:, :2] ** 2).sum() < ((values - plain)[:, :2] ** 2).sum()


@pytest.mark.parametrize("options", [{}, {"group": 16}, {"vector": 2, "bits": 6}], ids=str)
def test_threads_do_not_matter(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(3).normal(0, 1, (512, 4096)).astype(np.float16)
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        parts = encode_parts(CODEC, CODEC.encoder(weights.shape, "f16", options), weights)
        found.append({role: bits(part) for role, part in parts.items()})
    assert found[0] == found[1]


def test_groups_that_do_not_divide_become_smaller() -> None:
    weights = np.zeros((12, 3), np.float16)
    assert encode_tensor(CODEC, weights, {"group": 5}, dtype="f16").params["groups"] == [3, 1]
    assert encode_tensor(CODEC, weights, {"group": 50}, dtype="f16").params["groups"] == [1, 1]


def test_codebooks_along_two_axes_decode() -> None:
    """No encoder of ours makes them; Core ML allows them."""
    params = {"codec_version": 1, "bits": 2, "groups": [2, 3], "vector_size": 1, "vector_axis": 0, "dtype": "f16"}
    indices = np.random.default_rng(4).integers(0, 4, (4, 6), np.uint8)
    codebook = np.arange(24, dtype=np.float16)
    stream = np.packbits(np.unpackbits(indices.reshape(-1, 1), axis=1, count=2, bitorder="little"), bitorder="little")
    tensor = Tensor(
        "t",
        (4, 6),
        "f16",
        "palette",
        {"indices": memory_part(stream, "u8"), "codebook": memory_part(codebook, "f16")},
        params,
        CODEC,
    )
    wanted = codebook.reshape(2, 3, 4)[np.arange(4)[:, None] // 2, np.arange(6) // 2, indices]
    assert bits(tensor.numpy()) == bits(wanted)
    assert bits(read_rows(CODEC, tensor, "f16", (1, 2))) == bits(wanted)


def _tensor(**changes: Any) -> Tensor:
    tensor = encode_tensor(CODEC, np.ones((4, 5), np.float16), {"bits": 3, "entries": "i8", "group": 2}, dtype="f16")
    return replace(tensor, params={**tensor.params, **changes})


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("palette.params", {"bits": 5}),
        ("palette.params", {"bits": True}),
        ("palette.params", {"codec_version": 2}),
        ("palette.params", {"dtype": "f32"}),
        ("palette.params", {"dtype": "i8"}),
        ("palette.params", {"vector_axis": 2}),
        ("palette.params", {"groups": "2"}),
        ("palette.params", {"groups": [0, 1]}),
        ("palette.params", {"groups": [2**64, 1]}),
        ("palette.vector-size", {"vector_size": 3}),
        ("palette.vector-size", {"vector_size": 5}),
        ("palette.vector-size", {"vector_size": 8}),
        ("palette.vector-size", {"vector_size": 2, "vector_axis": 1}),
        ("palette.parts", {"scales": False}),
        ("palette.parts", {"scales": 1}),
        ("palette.groups", {"groups": [3, 1]}),
        ("palette.groups", {"groups": [2]}),
        ("palette.groups", {"groups": [2**62, 1]}),
        ("palette.size", {"groups": [4, 1]}),
        ("palette.size", {"bits": 4}),
    ],
)
def test_bad_parameters_are_refused(rule: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CodecError) as caught:
        CODEC.check(_tensor(**changes))
    assert caught.value.rule == rule


def test_the_size_five_of_the_mask_is_named() -> None:
    with pytest.raises(CodecError, match="0x36"):
        CODEC.check(_tensor(vector_size=5))


def test_sizes_past_two_to_the_64_are_refused() -> None:
    tensor = replace(_tensor(groups=[1, 1]), shape=(2**62, 2**62))
    with pytest.raises(CodecError) as caught:
        CODEC.decode(tensor, "f16")
    assert caught.value.rule == "palette.size"


@pytest.mark.parametrize(
    ("rule", "role", "values", "dtype"),
    [
        ("palette.dtype", "codebook", np.zeros(16, np.int16), "i16"),
        ("palette.dtype", "indices", np.zeros(8, np.int8), "i8"),
        ("palette.dtype", "codebook_scales", np.ones(2, np.int16), "i16"),
        ("palette.size", "codebook_scales", np.ones(3, np.float16), "f16"),
        ("palette.parts", "more", np.ones(3, np.float16), "f16"),
        ("palette.padding", "indices", np.full(8, 255, np.uint8), "u8"),
        ("palette.scale", "codebook_scales", np.array([1, np.nan], np.float16), "f16"),
    ],
)
def test_bad_parts_are_refused(rule: str, role: str, values: Array, dtype: str) -> None:
    tensor = _tensor()
    tensor = replace(tensor, parts={**tensor.parts, role: memory_part(values, dtype)})
    for read in (lambda: CODEC.decode(tensor, "f16"), lambda: read_rows(CODEC, tensor, "f16", (1,))):
        with pytest.raises(CodecError) as caught:
            read()
        assert caught.value.rule == rule


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("options", [{}, {"group": 2}, {"vector": 2}], ids=str)
def test_weights_that_are_not_finite_are_refused(bad: float, dtype: str, options: dict[str, Any]) -> None:
    values = np.ones((4, 4), numpy_dtype(dtype))
    values[2, 1] = bad
    with pytest.raises(CodecError) as caught:
        encode_tensor(CODEC, values, options, dtype=dtype)
    assert caught.value.rule == "palette.non-finite"
    assert "vector" in options or "column 1" in str(caught.value)


def test_entries_past_their_type_are_refused() -> None:
    values = np.full((2, 2), 1e6, np.float32)
    with pytest.raises(CodecError) as caught:
        encode_tensor(CODEC, values, {}, dtype="f32")
    assert caught.value.rule == "palette.entry-overflow"
    tensor = encode_tensor(CODEC, values, {"entries": "f32"}, dtype="f32")
    with pytest.raises(CodecError) as caught:
        tensor.numpy("f16")
    assert caught.value.rule == "palette.overflow"


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 5},
        {"vector": 5},
        {"group": 0},
        {"group": "row"},
        {"axis": 2},
        {"entries": "u8"},
        {"importance": [1.0]},
        {"importance": "1234"},
        {"importance": [0.0] * 4},
        {"importance": [-1.0] * 4},
        {"importance": [1.0] * 4, "vector": 2},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4, 4), "f16", options)
    assert caught.value.rule == "palette.option"


def test_shapes_that_vectors_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODEC.encoder((3, 4), "f16", {"vector": 2})
    assert caught.value.rule == "palette.vector-size"
    with pytest.raises(UnsupportedError):
        CODEC.encoder((4, 4), "i8", {})


@pytest.mark.parametrize("exponent", [-100, 90])
@pytest.mark.parametrize("size", [2, 4])
def test_vectors_are_found_at_any_size(exponent: int, size: int) -> None:
    """A power of two moves the entries and no index."""
    weights = np.random.default_rng(5).normal(0, 1, (8, 64)).astype(np.float32)
    options = {"bits": 4, "vector": size, "vector_axis": 1, "entries": "f32"}
    one, other = (encode_tensor(CODEC, array, options, dtype="f32") for array in (weights, np.ldexp(weights, exponent)))
    assert bits(other.parts["indices"].array()) == bits(one.parts["indices"].array())
    assert bits(other.parts["codebook"].array()) == bits(np.ldexp(one.parts["codebook"].array(), exponent))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_the_middle_between_two_entries_gets_the_lower(dtype: str) -> None:
    entries = np.array([-2, -1, 0.5, 2.5], np.float32)
    middle = np.array([-1.5, -0.25, 1.5], numpy_dtype(dtype))
    above = middle + 2.0 ** {"f16": -9, "bf16": -6}.get(dtype, -22)  # f64 is rounded to f32 first
    above = above.astype(middle.dtype)
    assert assign(middle, entries).tolist() == [0, 1, 2]
    assert assign(above, entries).tolist() == [1, 2, 3]


def test_scales_of_i8_entries_are_the_largest_over_127() -> None:
    for largest in (1.0, 0.3, 1e-4):
        _, scale, _ = entries_of(np.array([largest / 3, -largest]), "i8", "f16")
        assert scale is not None
        assert bits(scale) == bits(np.array([largest / 127], np.float16))
    codebook, scale, _ = entries_of(np.array([-1e-8, 0.5e-8]), "i8", "f16")
    assert scale is not None
    assert scale.tolist() == [2.0**-24]
    assert codebook.tolist() == [0, 0]
