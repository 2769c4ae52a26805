"""A table of values times scales: the suite, and what only this codec promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.palette.rows import pack
from ingot.codecs.scaled_codebook.codec import TABLES, ScaledCodebookCodec
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.layouts.affine import PER_TENSOR, ROW, Group
from ingot.model.layouts.scaled_codebook import Nested, ScaledCodebookLayout, Tiles
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import Case, CodecSuite, encode_tensor, read_rows

CODEC = ScaledCodebookCodec()
NF4 = TABLES["nf4"]


class TestScaledCodebook(CodecSuite):
    codec = CODEC
    cases = (
        *(Case((12, 64), dtype, {"group": 16}) for dtype in ("f32", "f16", "bf16")),
        *(Case((6, 96), "f32", {"group": 32, "scales": kind}) for kind in ("f16", "bf16")),
        *(Case(shape, "f32", {"group": "row"}) for shape in ((), (1,), (7,), (0,), (0, 3), (3, 0), (5, 3), (2, 3, 10))),
        Case((6, 64), "bf16", {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"}),
        Case((5, 48), "f16", {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn", "second": "divide"}),
        Case((2, 9, 20), "f32", {"table": "f8_e4m3fn", "group": [4, 8]}),
        Case((9, 20), "bf16", {"table": "f8_e5m2", "group": "tensor", "second": "multiply"}),
        Case((7, 15), "f32", {"group": 64, "flat": True, "order": "high_first"}),
        Case((4, 8), "f32", {"table": "f6_e3m2fn", "group": 4, "scales": "f8_e5m2"}),
        Case((3, 8, 6), "bf16", {"table": "f4_e2m1fn", "group": 4, "scales": "f8_e8m0fnu", "transposed": True}),
        Case((0, 8), "f32", {"table": "i8", "group": "tensor", "second": "multiply"}),
    )
    min_snr_db = 12.0


def test_values_are_entries_times_scales() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(0, 0.1, (6, 64)).astype(np.float32)
    tensor = encode_tensor(CODEC, array, {"group": 32}, dtype="f32")
    scales = tensor.parts["scales"].array().reshape(6, 2)
    assert np.array_equal(scales, np.abs(array.reshape(6, 2, 32)).max(-1))
    packed = np.frombuffer(tensor.parts["indices"].view(), np.uint8)
    indices = np.stack([packed & 15, packed >> 4], -1).reshape(6, 2, 32)
    assert np.array_equal(tensor.numpy(), (NF4[indices] * scales[..., None]).reshape(6, 64))
    nearest = np.abs((array.reshape(6, 2, 32) / scales[..., None])[..., None] - NF4).argmin(-1)
    assert np.array_equal(indices, nearest)


def test_zeros_stay_zeros() -> None:
    tensor = encode_tensor(CODEC, np.zeros((2, 64), np.float32), {}, dtype="f32")
    assert not tensor.numpy().any()
    assert (tensor.parts["scales"].array() == 1).all()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"table": "nf5"}, "scaled_codebook.option"),
        ({"group": 0}, "scaled_codebook.option"),
        ({"scales": "f64"}, "scaled_codebook.option"),
        ({"rows": 1}, "scaled_codebook.option"),
        ({"group": 48}, "scaled_codebook.group"),
        ({"group": [8]}, "scaled_codebook.option"),
        ({"group": "row", "flat": True}, "scaled_codebook.option"),
        ({"table": "i8", "order": "high_first"}, "scaled_codebook.option"),
        ({"scales": "f8_e8m0fnu", "second": "divide"}, "scaled_codebook.option"),
    ],
)
def test_options_are_checked(options, rule) -> None:
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        CODEC.encoder((4, 64), "f32", options)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"bits": 5}, "scaled_codebook.params"),
        ({"granularity": "row"}, "scaled_codebook.params"),
        ({"group_size": 7}, "scaled_codebook.group"),
        ({"group_size": 64}, "scaled_codebook.size"),
        ({"dtype": "f16"}, "scaled_codebook.params"),
        ({"values": "f4_e2m1fn"}, "scaled_codebook.params"),
        ({"codec_version": 2, "values": "f8_e4m3fn"}, "scaled_codebook.params"),
        ({"codec_version": 2, "values": "f4_e2m1fn"}, "scaled_codebook.parts"),
        ({"codec_version": 2, "scale_dtype": "f8_e8m0fnu"}, "scaled_codebook.dtype"),
        ({"codec_version": 2, "granularity": "tensor"}, "scaled_codebook.params"),
        ({"codec_version": 2, "order": "middle_first"}, "scaled_codebook.params"),
        ({"codec_version": 2, "second": "multiply"}, "scaled_codebook.parts"),
        ({"codec_version": 2, "nested": {"group_size": 0, "offset": 0.0}}, "scaled_codebook.params"),
        ({"codec_version": 2, "nested": {"group_size": 4, "offset": float("nan")}}, "scaled_codebook.params"),
        ({"codec_version": 2, "factor": 1e39}, "scaled_codebook.params"),
        ({"codec_version": 3}, "scaled_codebook.params"),
    ],
)
def test_attributes_are_checked(change, rule) -> None:
    tensor = encode_tensor(CODEC, np.ones((2, 64), np.float32), {"group": 16}, dtype="f32")
    with pytest.raises(IngotError) as caught:
        CODEC.check(replace(tensor, params={**tensor.params, **change}))
    assert caught.value.rule == rule


def test_finite_numbers_never_become_infinite() -> None:
    tensor = encode_tensor(CODEC, np.full((1, 64), 60000, np.float32), {}, dtype="f32")
    loud = replace(tensor, parts={**tensor.parts, "scales": memory_part(np.array([70000], np.float32), "f32")})
    assert loud.numpy("f32").max() == 70000
    with pytest.raises(CodecError) as caught:
        loud.numpy("f16")
    assert caught.value.rule == "scaled_codebook.overflow"


def stored(layout: ScaledCodebookLayout, parts: dict[str, np.ndarray], shape: tuple[int, ...]) -> Tensor:
    return Tensor.from_parts(layout, parts, shape)


CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("values", ["f4_e2m1fn", "f6_e2m3fn", "f6_e3m2fn", "f8_e4m3fn", "f8_e5m2", "i8"])
def test_named_values_are_those_of_the_type(values: str) -> None:
    bits = DTYPES[values].bits
    layout = ScaledCodebookLayout(bits, PER_TENSOR, "f32", values=values)
    tensor = stored(layout, {"indices": pack(CODES[: 1 << bits], bits), "scales": np.ones(1, np.float32)}, (1 << bits,))
    wanted = CODES[: 1 << bits].view(numpy_dtype(values)).astype(np.float32)
    assert np.array_equal(tensor.numpy(), wanted, equal_nan=True)
    assert np.array_equal(np.signbit(tensor.numpy()), np.signbit(wanted))


def test_powers_of_two_as_scales() -> None:
    """0 is a subnormal, 255 is NaN, and 254 times a number past the range is refused."""
    layout = ScaledCodebookLayout(8, Group(1), "f32", values="f8_e4m3fn", scales="f8_e8m0fnu")
    ones = np.full(3, 0x38, np.uint8)
    tensor = stored(layout, {"indices": ones, "scales": np.array([0, 254, 255], np.uint8)}, (3, 1))
    assert np.array_equal(tensor.numpy().ravel(), np.array([2.0**-127, 2.0**127, np.nan], np.float32), equal_nan=True)
    with pytest.raises(CodecError) as caught:
        stored(layout, {"indices": ones + 8, "scales": np.full(3, 254, np.uint8)}, (3, 1)).numpy()
    assert caught.value.rule == "scaled_codebook.overflow"


def test_blocks_that_do_not_divide_the_matrix() -> None:
    rng = np.random.default_rng(1)
    layout = ScaledCodebookLayout(8, Tiles(4, 3), "f32", values="f8_e4m3fn")
    codes, scales = rng.integers(0, 120, (2, 6, 7), dtype=np.uint8), rng.normal(0, 1, (2, 2, 3)).astype(np.float32)
    tensor = stored(layout, {"indices": codes, "scales": scales}, (2, 6, 7))
    wanted = codes.view(numpy_dtype("f8_e4m3fn")).astype(np.float32)
    wanted *= scales.repeat(4, 1)[:, :6].repeat(3, 2)[:, :, :7]
    assert np.array_equal(tensor.numpy(), wanted)
    assert np.array_equal(tensor[1, 2:5], wanted[1, 2:5])


def test_steps_of_a_scale_are_rounded_in_order() -> None:
    rng = np.random.default_rng(2)
    codes, second = rng.integers(0, 256, (4, 8), dtype=np.uint8), np.array([3.3], np.float32)
    scales = rng.normal(0, 1, 16).astype(np.float32)
    entries = (codes[..., None] >> np.array([4, 0], np.uint8) & 15).reshape(4, 16).view(np.uint8)
    values = entries.view(numpy_dtype("f4_e2m1fn")).astype(np.float32)
    for name, wanted in (("multiply", scales * second), ("divide", scales / second)):
        layout = ScaledCodebookLayout(4, Group(4), "f32", values="f4_e2m1fn", order="high_first", second=name)
        tensor = stored(layout, {"indices": codes, "scales": scales, "second_scale": second}, (4, 16))
        assert np.array_equal(tensor.numpy(), (values.reshape(16, 4) * wanted[:, None]).reshape(4, 16))
    table, outer = rng.normal(0, 1, 256).astype(np.float32), rng.normal(0, 1, 6).astype(np.float32)
    layout = ScaledCodebookLayout(
        4, Group(4), "f32", "f32", "u8", "f4_e2m1fn", "high_first", nested=Nested(3, 0.1), factor=1 / 3
    )
    assert (
        ScaledCodebookLayout.from_tensor(Tensor("x", (4, 16), "f32", layout.codec, {}, layout.attributes())) == layout
    )
    parts = {"indices": codes, "scales": CODES[50:66], "scale_codebook": table, "scale_scales": outer}
    wide = table[50:66] * outer.repeat(3)[:16] + np.float32(0.1)
    wanted = values.reshape(16, 4) * wide[:, None] * np.float32(1 / 3)
    assert np.array_equal(stored(layout, parts, (4, 16)).numpy(), wanted.reshape(4, 16))


def test_matrices_that_are_stored_the_other_way_round() -> None:
    source = np.random.default_rng(3).normal(0, 1, (3, 6, 8)).astype(np.float32)
    plain = encode_tensor(CODEC, source, {"table": "f4_e2m1fn", "group": 4, "scales": "f8_e8m0fnu"}, dtype="f32")
    layout = replace(plain.layout, transposed=True)
    turned = replace(plain, shape=(3, 8, 6), params=layout.attributes())
    wanted = plain.numpy().swapaxes(1, 2)
    assert np.array_equal(turned.numpy(), wanted)
    assert np.array_equal(turned[2, 3:5, 1:], wanted[2, 3:5, 1:])
    assert np.array_equal(read_rows(CODEC, turned, "f32", (3, 11)), wanted)


@pytest.mark.parametrize(("second", "kind"), [(np.inf, "multiply"), (np.nan, "divide"), (0, "divide")])
def test_second_scales_are_checked(second: float, kind: str) -> None:
    layout = ScaledCodebookLayout(4, ROW, "f32", values="f4_e2m1fn", second=kind)
    ones = np.ones(1, np.float32)
    tensor = stored(layout, {"indices": CODES[:1], "scales": ones, "second_scale": ones * np.float32(second)}, (1, 2))
    with pytest.raises(CodecError) as caught:
        tensor.numpy()
    assert caught.value.rule == "scaled_codebook.second"


def test_the_largest_number_gets_the_largest_code() -> None:
    """Microscaling's rule: powers of two below, numbers past the range become the largest; of others nothing is cut."""
    source = np.array([[7.0, -1.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    options = {"table": "f4_e2m1fn", "group": 4}
    tensor = encode_tensor(CODEC, source, {**options, "scales": "f8_e8m0fnu"}, dtype="f32")
    assert tensor.parts["scales"].array().tolist() == [127, 127]
    assert tensor.numpy().tolist() == [[6.0, -1.0, 0.0, 3.0], [0.0] * 4]
    second = encode_tensor(CODEC, source, {**options, "scales": "f8_e4m3fn", "second": "multiply"}, dtype="f32")
    assert second.parts["scales"].array().tolist() == [0x7E, 0x38]
    assert second.parts["second_scale"].array()[0] == np.float32(7 / (6 * 448))
    assert second.numpy()[0, 0] == np.float32(448) * np.float32(7 / (6 * 448)) * 6
