"""The affine codec: the suite, and what only this codec promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.core.numeric import buffers
from ingot.core.numeric.dtypes import float_name, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, encode_tensor, read_rows
from tests.support.reference import affine as reference
from tests.support.reference.affine import Grid

CODEC = AffineCodec()
WAYS = ("minmax", "mse")


class TestAffineCodec(CodecSuite):
    codec = AffineCodec()
    cases = (
        *(Case((5, 300), "bf16", {"bits": bits, "group": 64}) for bits in range(2, 9)),
        *(Case((6, 131), dtype, {"bits": 4, "group": 32}) for dtype in ("f16", "f32", "f64")),
        *(Case(shape) for shape in ((), (0,), (1,), (7,), (0, 3), (3, 0), (2, 3, 40), (2, 0, 3), (1, 2, 1, 2))),
        *(Case((5, 77), "f32", {"bits": 8, "group": group}) for group in ("row", "tensor", 1, 1000)),
        *(Case((5, 77), "bf16", {"symmetric": False, "group": group, "bits": 3}) for group in ("row", "tensor", 10)),
        *(Case((5, 77), "f16", {"symmetric": False, "signed": True, "bits": b, "group": 10}) for b in range(2, 9)),
        *(Case((5, 77), "f32", {"symmetric": False, "signed": True, "group": "tensor", "bits": b}) for b in (2, 4)),
        *(
            Case(shape, "f32", {"group": way, "symmetric": False, "signed": True})
            for way in ("row", "tensor")
            for shape in ((), (0, 3), (3, 0))
        ),
        *(Case((5, 77), "f32", {"scales": scales, "bit_order": "msb"}) for scales in ("f16", "bf16", "f32")),
        *(Case((5, 77), "f16", {"quantizer": "mse", "symmetric": way}) for way in (True, False)),
        *(Case((5, 77), "f16", {"quantizer": "mse", "symmetric": way, "group": "tensor"}) for way in (True, False)),
        *(Case(shape, "f32", {"group": "tensor", "symmetric": False}) for shape in ((), (0, 3), (3, 0))),
        *(Case(shape, "f32", {"group": "row", "bits": 8}) for shape in ((), (0, 3), (3, 0))),
        *(
            Case((5, 77), dtype, {"zero_kind": "offset", "bits": width, "group": 10, "quantizer": way, "scales": dtype})
            for dtype, ways in (("f32", WAYS), ("f16", WAYS[::-1]), ("bf16", WAYS))
            for width, way in zip((2, 3, 4, 8), ways * 2, strict=True)
        ),
        *(Case(shape, "f32", {"group": "row", "zero_kind": "offset"}) for shape in ((), (0, 3), (3, 0))),
        *(Case((5, 77), dtype, {"scales": "source"}) for dtype in ("f64", "bf16")),
        *(Case((5, 77), "f32", {"bits": 4, "group": 10, "zero_point": point}) for point in (1, 7, 8, 14)),
        *(Case((4, 3, 2, 2), "f32", {"bits": 8, "group": "row", "cut": "axis0"}),),
        *(Case(shape, "f32", {"bits": 5, "group": 2, "cut": "axis0"}) for shape in ((), (4,), (3, 7, 3), (0, 3, 2))),
        *(Case(shape, "bf16", {"bits": 3, "group": 16, "cut": "flat"}) for shape in ((6, 24), (2, 3, 8), (5, 48))),
        Case((6, 24), "f32", {"bits": 3, "group": 16, "cut": "flat", "zero_point": 3, "scales": "f32"}),
    )
    min_snr_db = 3.0


def affine(array: Array, **options: Any) -> Tensor:
    return encode_tensor(CODEC, array, options, dtype=float_name(array))


def codes_of(tensor: Tensor) -> Array:
    """The integers that a tensor's codes stand for, as f32."""
    rows, cols = tensor.matrix_shape
    bits = int(tensor.params["bits"])
    packed = np.frombuffer(tensor.parts["packed_weight"].view(), np.uint8).reshape(rows, -1)
    codes = reference.unpack(packed, cols, bits, msb=tensor.params["packing"] == "rows_msb")
    return reference.values_of(codes, bits, signed=bool(tensor.params["signed"]))


def weights(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


def refused(error: type[IngotError], call: Callable[[], object]) -> str | None:
    with pytest.raises(error) as caught:
        call()
    return caught.value.rule


def test_int8_per_row_is_vectro() -> None:
    """The Squish document, section 3, as it stands there; a row of zeros has scale 1."""
    array = weights(9, 203)
    array[3], array[4], array[5, 7] = 0, 1e-42, 30.0
    tensor = affine(array, bits=8)
    with np.errstate(invalid="ignore"):
        scale = np.max(np.abs(array), axis=1) / np.float32(127)
        scale[scale == 0] = 1
        q = np.round(array / scale[:, None]).clip(-128, 127).astype(np.int8)
    assert tensor.parts["scales"].dtype == "f32"
    assert np.array_equal(tensor.parts["scales"].array(), scale)
    assert np.array_equal(np.frombuffer(tensor.parts["packed_weight"].view(), np.int8), q.reshape(-1))
    assert np.array_equal(tensor.numpy(), q.astype(np.float32) * scale[:, None])


@pytest.mark.parametrize("options", [{"bits": bits, "group": 33} for bits in range(2, 9)], ids=str)
@pytest.mark.parametrize("way", [{}, {"symmetric": False}, {"bit_order": "msb"}, {"scales": "f32"}, {"scales": "bf16"}])
def test_error_is_at_most_half_a_step(options: dict[str, Any], way: dict[str, Any]) -> None:
    array = weights(4, 100, seed=1)
    tensor = affine(array, **options, **way)
    scales = tensor.parts["scales"].array().astype(np.float32).reshape(4, 4)
    step = np.repeat(scales, 33, axis=1)[:, :100]
    error = np.abs(tensor.numpy("f64") - array)
    # A scale rounded down moves the ends of the range past the last code by so much of a step.
    ends = (2 ** options["bits"]) * {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-23}[tensor.parts["scales"].dtype]
    assert (error <= step * (0.5 + ends)).all()
    if way.get("scales") == "f32":
        assert (error <= step * 0.50001).all()


@pytest.mark.parametrize("bits", range(2, 6))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, "row", "tensor"])
def test_search_never_loses(bits: int, symmetric: bool, group: int | str) -> None:
    array = weights(16, 128, seed=bits)
    plain = measure(array, affine(array, bits=bits, symmetric=symmetric, group=group).numpy())
    best = measure(array, affine(array, bits=bits, symmetric=symmetric, group=group, quantizer="mse").numpy())
    assert best.squared_error <= plain.squared_error * 1.000001
    if bits <= 3:
        assert best.snr_db > plain.snr_db + 0.5


def test_one_scale_for_a_tensor_equals_the_reference() -> None:
    array = weights(20, 45)
    for symmetric in (True, False):
        for quantizer in ("mse", "absmax" if symmetric else "minmax"):
            tensor = affine(array, bits=3, symmetric=symmetric, group="tensor", quantizer=quantizer, scales="f16")
            grid = Grid(3, 45, symmetric, "f16", search=quantizer == "mse", per_tensor=True)
            codes, scales, _ = reference.quantize(array, grid)
            assert tensor.parts["scales"].array() == scales
            assert np.array_equal(codes_of(tensor), reference.values_of(codes, 3, signed=symmetric)), (
                symmetric,
                quantizer,
            )


def test_codes_and_their_order() -> None:
    array = np.array([[-4, -3, -2, -1, 0, 1, 2, 3]], np.float32)
    lsb = affine(array, bits=3, group=8, scales="f32", quantizer="mse")
    assert codes_of(lsb).tolist() == [[-4, -3, -2, -1, 0, 1, 2, 3]]
    assert lsb.parts["scales"].array() == 1
    # 100 101 110 111 000 001 010 011, first code in the low or in the high bits.
    assert bytes(lsb.parts["packed_weight"].view()) == int("011010001000111110101100", 2).to_bytes(3, "little")
    msb = affine(array, bits=3, group=8, scales="f32", quantizer="mse", bit_order="msb")
    assert bytes(msb.parts["packed_weight"].view()) == int("100101110111000001010011", 2).to_bytes(3, "big")


def test_signed_codes_with_zero_points() -> None:
    """w = s * (q - z) stays; codes and zero points are less by 2^(bits - 1), and spare bits are 0."""
    array = np.array([[-1, 0, 1, 2, 13, 14, 0]], np.float32)
    for order in ("lsb", "msb"):
        tensor = affine(array, bits=4, group=6, scales="f32", symmetric=False, signed=True, bit_order=order)
        assert tensor.parts["scales"].array().tolist() == [1, 1]
        assert tensor.parts["zeros"].array().tolist() == [1 - 8, -8]
        assert codes_of(tensor).tolist() == [[-8, -7, -6, -5, 6, 7, -8]]
        assert tensor.params["signed"] is True
        assert tensor.params["zeros"] is True
        assert tensor.parts["packed_weight"].array()[-1] == {"lsb": 0x08, "msb": 0x80}[order]
        assert np.array_equal(tensor.numpy(), array)


def test_flat_streams_need_no_boundaries_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    array = weights(4097, 1101)
    tensor = affine(array, bits=3, group=100)
    codes = reference.unpack(
        np.frombuffer(tensor.parts["packed_weight"].view(), np.uint8).reshape(4097, -1), 1101, 3, msb=False
    )
    stream = (codes.reshape(-1, 1) >> np.arange(3) & 1).astype(np.uint8)
    packed = memory_part(np.packbits(stream.reshape(-1), bitorder="little"), "u8")
    params = {**tensor.params, "packing": "flat_lsb"}
    flat = replace(tensor, params=params, parts={**tensor.parts, "packed_weight": packed})
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert flat.numpy("bf16").tobytes() == tensor.numpy("bf16").tobytes()
    same = affine(weights(5, 16), bits=3)  # rows that fill their bytes: the same bytes
    assert replace(same, params={**same.params, "packing": "flat_lsb"}).numpy().tobytes() == same.numpy().tobytes()


def test_parameters_are_written_and_taken_back() -> None:
    tensor = affine(weights(3, 10), bits=3, group=4, symmetric=False, bit_order="msb")
    assert tensor.params == {
        "codec_version": 1,
        "bits": 3,
        "granularity": "group",
        "group_size": 4,
        "axis": -1,
        "packing": "rows_msb",
        "signed": False,
        "zeros": True,
        "dtype": "f32",
    }
    assert tensor.layout.attributes() == tensor.params
    assert {role: part.length for role, part in tensor.parts.items()} == {
        "packed_weight": 12,
        "scales": 18,
        "zeros": 18,
    }


@pytest.mark.parametrize("packing", ["8_per_i32", "8_per_u32", "2_per_u8", "16_per_i64", "4_per_i16"])
@pytest.mark.parametrize("cols", [16, 13])
def test_plain_ztensor_attributes(packing: str, cols: int) -> None:
    """zTensor 1.2 section 3: little-endian integers, first code in the low bits; our reading of what it leaves open."""
    per, word = int(packing.partition("_per_")[0]), packing.partition("_per_")[2]
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (3, cols), np.uint8)
    padded = np.pad(codes, ((0, 0), (0, -cols % per))).reshape(3, -1, per).astype(np.uint64)
    packed = (padded << (4 * np.arange(per, dtype=np.uint64))).sum(axis=2, dtype=np.uint64).astype(f"<u{4 * per // 8}")
    groups = -(-cols // 8)
    scales, zeros = (rng.uniform(0.1, 9, (3, groups)).astype(np.float16) for _ in range(2))
    parts = {
        "packed_weight": memory_part(packed.view(f"<{word[0]}{4 * per // 8}"), word),
        "scales": memory_part(scales, "f16"),
        "zeros": memory_part(zeros, "f16"),
    }
    plain = {"bits": 4, "group_size": 8, "packing": packing}
    tensor = Tensor("t", (3, cols), "f16", "affine", parts, plain, CODEC)
    wanted = reference.dequantize(codes, Grid(4, 8, False, "f16"), scales, zeros, "f16")
    assert tensor.numpy().tobytes() == wanted.tobytes()
    assert read_rows(CODEC, tensor, "f16", (1,)).tobytes() == wanted.tobytes()
    without = replace(tensor, parts={role: parts[role] for role in ("packed_weight", "scales")})
    symmetric = reference.dequantize(codes, Grid(4, 8, False, "f16"), scales, None, "f16")
    assert without.numpy().tobytes() == symmetric.tobytes()
    for wrong in (
        {"bits": 3},
        {"packing": "5_per_i32"},
        {"packing": "8_per_f32"},
        {"packing": ""},
        {"salt": 1},
        {"axis": 2},
    ):
        assert refused(CodecError, replace(tensor, params={**plain, **wrong}).numpy) == "affine.params"
    for axis in (-1, 1):
        assert replace(tensor, params={**plain, "axis": axis}).numpy().tobytes() == wanted.tobytes()
    for other in ({"axis": 0}, {"axis": -2}, {"sym": True}, {"desc_act": False}, {"quant_method": "gptq"}):
        assert refused(CodecError, replace(tensor, params={**plain, **other}).numpy) == "affine.axis"
    for key in plain:
        missing = {name: value for name, value in plain.items() if name != key}
        assert refused(CodecError, replace(tensor, params=missing).numpy) == "affine.params"


WRONG_PARAMS: list[dict[str, Any]] = [
    {"codec_version": 2},
    {"codec_version": True},
    {"codec_version": None},
    {"bits": 0},
    {"bits": 9},
    {"bits": 4.0},
    {"bits": "4"},
    {"granularity": "column"},
    {"granularity": None},
    {"group_size": 0},
    {"group_size": -1},
    {"group_size": 2**63},
    {"group_size": None},
    {"packing": "rows"},
    {"packing": "8_per_i32"},
    {"packing": 3},
    {"signed": 1},
    {"zeros": "no"},
    {"axis": 0},
    {"dtype": "i8"},
    {"dtype": ["f32"]},
]


@pytest.mark.parametrize("change", WRONG_PARAMS, ids=str)
def test_wrong_parameters_are_refused(change: dict[str, Any]) -> None:
    tensor = affine(weights(3, 10), group=4)
    wrong = replace(tensor, params={**tensor.params, **change})
    assert refused(CodecError, lambda: CODEC.check(wrong)) == "affine.params"
    assert refused(CodecError, lambda: CODEC.reader(wrong)) == "affine.params"
    assert refused(CodecError, wrong.numpy) == "affine.params"


def test_wrong_parts_are_refused() -> None:
    tensor = affine(weights(3, 10), group=4, symmetric=False)
    parts = dict(tensor.parts)

    def rule(changed: Mapping[str, Part]) -> str | None:
        return refused(CodecError, replace(tensor, parts=changed).numpy)

    assert rule({**parts, "g_idx": parts["scales"]}) == "affine.parts"
    assert rule({"packed_weight": parts["packed_weight"], "scales": parts["scales"]}) == "affine.parts"
    assert rule({**parts, "zeros": memory_part(np.zeros(9, np.float32), "f32")}) == "affine.dtype"
    assert rule({**parts, "scales": memory_part(np.zeros(9, np.int16), "i16")}) == "affine.dtype"
    assert rule({**parts, "scales": replace(parts["scales"], type="f8_e5m2")}) == "affine.dtype"
    assert rule({**parts, "packed_weight": memory_part(np.zeros(15, np.int8), "i8")}) == "affine.dtype"
    assert rule({**parts, "packed_weight": memory_part(np.zeros(14, np.uint8), "u8")}) == "affine.size"
    assert rule({**parts, "scales": memory_part(np.zeros(10, np.float16), "f16")}) == "affine.size"
    assert rule({**parts, "zeros": memory_part(np.zeros(8, np.float16), "f16")}) == "affine.size"
    for shape in ((3, 11), (2, 10), (4, 10), (30,), (2**40, 2**40), (0, 10), (2**62, 0)):
        resized = replace(tensor, shape=shape)
        assert refused(CodecError, partial(CODEC.check, resized)) == "affine.size", shape


def test_any_number_of_empty_rows_takes_no_time() -> None:
    tensor = affine(weights(3, 0), group=4)
    many = replace(tensor, shape=(2**60, 0))
    assert many.numpy().shape == (2**60, 0)
    assert read_rows(CODEC, many, "f32").shape == (2**60, 0)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("group", [4, "row", "tensor"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(dtype: str, group: int | str, bad: float) -> None:
    array = weights(3, 10).astype(numpy_dtype(dtype))
    array[2, 7] = bad
    with pytest.raises(CodecError) as caught:
        affine(array, group=group)
    assert caught.value.rule == "affine.non-finite"
    assert "row 2, column 7" in str(caught.value)


@pytest.mark.parametrize("group", [4, "row", "tensor"])
@pytest.mark.parametrize("options", [{}, {"symmetric": False}], ids=str)
def test_a_scale_past_f16_is_refused_and_others_hold_it(group: int | str, options: dict[str, Any]) -> None:
    array = weights(3, 10)
    array[1, 5] = 1e9
    rule = refused(CodecError, lambda: affine(array, group=group, scales="f16", **options))
    assert rule == "affine.scale-overflow"
    for scales in ("bf16", "f32"):
        found = affine(array, group=group, scales=scales, **options).numpy()
        assert abs(found[1, 5] / 1e9 - 1) < 0.01
    # The search may shrink the range until the scale fits.
    array[1, 5] = 65504 * 7 * 1.5
    shrunk = affine(array, group=group, scales="f16", quantizer="mse").numpy()
    assert np.isfinite(shrunk).all()
    assert shrunk[1, 5] > 0.6 * array[1, 5]


def test_tiny_weights_keep_a_scale() -> None:
    array = np.full((2, 8), 1e-9, np.float32)
    tensor = affine(array, group=4)
    assert (tensor.parts["scales"].array() == np.float16(2**-24)).all()
    assert not affine(array * 0, group=4).numpy().any()


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"bits": 0},
    {"bits": 9},
    {"bits": True},
    {"bits": 1},
    {"group": 0},
    {"group": -1},
    {"group": "column"},
    {"group": 2.0},
    {"symmetric": 1},
    {"symmetric": "yes"},
    {"scales": "f64"},
    {"scales": None},
    {"bit_order": "big"},
    {"signed": 1},
    {"signed": False},
    {"symmetric": False, "signed": None},
    {"quantizer": "best"},
    {"quantizer": "absmax", "symmetric": False},
    {"quantizer": "minmax", "symmetric": True},
    {"group_size": 4},
    {"zero_kind": "slope"},
    {"zero_kind": "offset", "symmetric": True},
    {"zero_kind": "offset", "signed": True},
    {"zero_kind": "offset", "group": "tensor"},
    {"zero_kind": "offset", "unbiased": True},
    {"zero_kind": "offset", "quantizer": "absmax"},
    {"zero_kind": "offset", "zero_point": 3},
    {"zero_point": 0},
    {"zero_point": 15},
    {"zero_point": 7.0},
    {"zero_point": True},
    {"zero_point": 7, "signed": True},
    {"zero_point": 7, "symmetric": False},
    {"zero_point": 7, "group": "tensor"},
    {"cut": "columns"},
    {"cut": "flat", "group": "row"},
    {"cut": "axis0", "group": "tensor"},
]


def test_formulas_of_squish() -> None:
    """Offset: z = min, s = (max - min) / 15, 1 where equal. Constant: q + 7 with s = max / 7 (section 4)."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 1, (3, 64)).astype(np.float32)
    weights[1] = 0.25
    offset = affine(weights, bits=4, group=32, zero_kind="offset", scales="f32")
    groups = weights.reshape(3, 2, 32)
    low, high = groups.min(axis=2), groups.max(axis=2)
    assert offset.parts["zeros"].array().tobytes() == low.tobytes()
    wanted = np.where(low == high, np.float32(1), (high - low) / np.float32(15))
    assert offset.parts["scales"].array().tobytes() == wanted.astype(np.float32).tobytes()
    assert (np.abs(offset.numpy().reshape(3, 2, 32) - groups) <= wanted[:, :, None] * 0.5001).all()
    constant = affine(weights, bits=4, group=32, zero_point=7, scales="f32")
    assert constant.params["zero_point"] == 7
    assert constant.params["signed"] is False
    most = np.abs(groups).max(axis=2)
    assert constant.parts["scales"].array().tobytes() == (most / np.float32(7)).tobytes()
    codes = codes_of(constant).reshape(3, 2, 32)
    assert np.array_equal(codes, np.rint(groups / (most / np.float32(7))[:, :, None]) + 7)


def test_an_offset_past_its_type_is_refused() -> None:
    weights = np.full((1, 4), 70000, np.float32)
    assert refused(CodecError, lambda: affine(weights, zero_kind="offset", scales="f16")) == "affine.scale-overflow"


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=str)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    assert refused(UsageError, lambda: CODEC.encoder((2, 8), "f32", options)) == "affine.option"


def test_runs_that_do_not_divide_the_elements_are_refused() -> None:
    options = {"cut": "flat", "group": 3}
    assert refused(UnsupportedError, lambda: CODEC.encoder((2, 8), "f32", options)) == "affine.cut"


@pytest.mark.parametrize("dtype", ["i8", "bool", "f8_e4m3fn", "complex64"])
def test_only_floats_are_quantized(dtype: str) -> None:
    assert refused(UnsupportedError, lambda: CODEC.encoder((2, 8), dtype, {})) == "affine.dtype"


def test_only_floats_come_out() -> None:
    assert refused(UnsupportedError, lambda: affine(weights(2, 8)).numpy("i8")) == "affine.dtype"


def test_threads_and_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_MIN_ALIGNED", 1 << 20)
    array = weights(4100, 1100)
    tensor = affine(array.astype(numpy_dtype("bf16")), bits=3, group=100)
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        results.append(tensor.numpy("f16").tobytes())
        results.append(tensor.numpy(out=np.ones(array.shape, np.float16)).tobytes())
        own = tensor.numpy("f16", copy=True)
        assert own.flags.writeable
        results.append(own.tobytes())
        unmapped = {role: replace(part, source=Unmapped(part.stored())) for role, part in tensor.parts.items()}
        results.append(replace(tensor, parts=unmapped).numpy("f16").tobytes())
    assert len(set(results)) == 1


class Unmapped(MemorySource):
    mapped = False


@pytest.mark.parametrize("group", [4, "row", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_past_the_target_are_refused(group: int | str, symmetric: bool) -> None:
    array = weights(3, 10)
    array[2, 9] = 1e5
    tensor = affine(array, group=group, symmetric=symmetric, scales="f32")
    assert refused(CodecError, lambda: tensor.numpy("f16")) == "affine.overflow"
    assert refused(CodecError, lambda: read_rows(CODEC, tensor, "f16", (1,))) == "affine.overflow"
    assert np.isfinite(tensor.numpy("bf16").astype(np.float32)).all()
    array[2, 9] = 65504
    fits = affine(array, group=group, symmetric=symmetric, scales="f32").numpy("f16")
    assert np.isfinite(fits).all()


def test_scales_that_are_not_finite_decode_as_they_are() -> None:
    tensor = affine(weights(3, 8), group=4, scales="f32")
    scales = tensor.parts["scales"].array().copy().reshape(3, 2)
    scales[1, 1] = np.nan
    damaged = replace(tensor, parts={**tensor.parts, "scales": memory_part(scales, "f32")})
    for dtype in ("f32", "f16", "bf16", "f64"):
        found = np.isnan(damaged.numpy(dtype).astype(np.float64))
        assert found[1, 4:].all()
        assert found.sum() == 4


def stored(scale: float, zero: float, scale_dtype: str = "f32", **changes: Any) -> Tensor:
    """Eight unsigned codes, 0 to 255, under one scale and zero point."""
    params = {"codec_version": 1, "bits": 8, "granularity": "row", "axis": -1, "packing": "rows_lsb"}
    params |= {"signed": False, "zeros": True, "dtype": "f32", **changes}
    codes = np.array([0, 1, 2, 3, 100, 200, 254, 255], np.uint8)
    parts = {"packed_weight": memory_part(codes, "u8")}
    for role, value in (("scales", scale), ("zeros", zero)):
        parts[role] = memory_part(np.array([value], numpy_dtype(scale_dtype)), scale_dtype)
    return Tensor("tensor", (1, 8), "f32", "affine", parts, params, CODEC)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (stored(1, 1e5), "f16"),
        (stored(1, 7e4, zero_kind="offset"), "f16"),
        (stored(257, 0), "f16"),
        (stored(1, 3.399e38, zero_kind="offset"), "bf16"),
        (stored(1, 3.397e38), "bf16"),
        (stored(2.0**121, 0), "f32"),
    ],
)
def test_zero_points_and_all_codes_count_towards_the_range(tensor: Tensor, dtype: str) -> None:
    assert refused(CodecError, lambda: tensor.numpy(dtype)) == "affine.overflow"
    if dtype != "f32":
        assert np.isfinite(tensor.numpy("f32")).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_an_infinite_zero_point_decodes_to_infinity(dtype: str) -> None:
    assert np.isneginf(stored(1, np.inf).numpy(dtype).astype(np.float32)).all()
    assert np.isposinf(stored(1, np.inf, zero_kind="offset").numpy(dtype).astype(np.float32)).all()
