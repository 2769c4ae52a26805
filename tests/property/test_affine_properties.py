"""Any weights, any options: chunks change nothing, codes equal the reference, errors stay within half a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.affine.codec import AffineCodec
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import encode_tensor, read_rows, zstd_part
from tests.support.reference import affine as reference
from tests.support.reference.affine import Grid
from tests.support.strategies import FLOATS, matrices

CODEC = AffineCodec()


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    symmetric = draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        return {
            "bits": draw(st.integers(1, 8)),
            "group": draw(st.one_of(st.integers(1, 50), st.just("row"))),
            "symmetric": False,
            "signed": False,
            "zero_kind": "offset",
            "scales": draw(st.sampled_from(("f32", "f16", "bf16"))),
            "bit_order": draw(st.sampled_from(("lsb", "msb"))),
            "quantizer": draw(st.sampled_from(("minmax", "mse"))),
        }
    return {
        "bits": draw(st.integers(2 if symmetric else 1, 8)),
        "group": draw(st.one_of(st.integers(1, 50), st.sampled_from(("row", "tensor")))),
        "symmetric": symmetric,
        "signed": symmetric or draw(st.booleans()),
        "scales": draw(st.sampled_from(("f32", "f16", "bf16"))),
        "bit_order": draw(st.sampled_from(("lsb", "msb"))),
        "quantizer": draw(st.sampled_from(("absmax" if symmetric else "minmax", "mse"))),
    }


@st.composite
def weights(draw: st.DrawFn) -> Array:
    """Finite values over the whole exponent range that every scale type can follow, zeros and constants among them."""
    shape = draw(matrices())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from((0, 4, 24)))
    values = rng.normal(0, 1, shape) * 2.0 ** rng.integers(-spread, spread // 2 + 1, shape)
    values[rng.random(shape) < draw(st.sampled_from((0.0, 0.5, 1.0)))] = draw(st.sampled_from((0.0, -0.0, 0.25)))
    return values.astype(numpy_dtype(draw(st.sampled_from(FLOATS))))


@given(weights(), options(), st.lists(st.integers(0, 40), max_size=4))
def test_chunks_change_nothing_and_codes_equal_the_reference(
    array: Array, chosen: dict[str, Any], cuts: list[int]
) -> None:
    dtype = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}[array.dtype.name]
    whole = encode_tensor(CODEC, array, chosen, dtype=dtype)
    cut = encode_tensor(CODEC, array, chosen, dtype=dtype, cuts=cuts)
    for role, part in whole.parts.items():
        assert bytes(part.view()) == bytes(cut.parts[role].view()), role
    assert read_rows(CODEC, whole, "f32", cuts).tobytes() == whole.numpy("f32").tobytes()
    if array.size:
        check_reference(array, chosen, whole)


def check_reference(array: Array, chosen: dict[str, Any], tensor: Tensor) -> None:
    group = array.shape[1] if isinstance(chosen["group"], str) else chosen["group"]
    grid = Grid(
        chosen["bits"],
        group,
        chosen["symmetric"],
        chosen["scales"],
        search=chosen["quantizer"] == "mse",
        per_tensor=chosen["group"] == "tensor",
        offset=chosen.get("zero_kind") == "offset",
    )
    codes, scales, zeros = reference.quantize(array, grid)
    if chosen["signed"] and not chosen["symmetric"]:
        codes, zeros = reference.to_signed(codes, zeros, grid.bits)
    parts = {role: bytes(part.view()) for role, part in tensor.parts.items()}
    assert parts["scales"] == scales.tobytes()
    assert parts.get("zeros", zeros.tobytes()) == zeros.tobytes()
    assert parts["packed_weight"] == reference.pack(codes, grid.bits, msb=chosen["bit_order"] == "msb").tobytes()


@given(weights(), st.integers(2, 8), st.integers(1, 50), st.booleans())
def test_error_is_at_most_half_a_step(array: Array, bits: int, group: int, symmetric: bool) -> None:
    chosen = {"bits": bits, "group": group, "symmetric": symmetric, "scales": "f32"}
    exact = array.astype(np.float32)
    tensor = encode_tensor(CODEC, exact, chosen, dtype="f32")
    scales = tensor.parts["scales"].array().reshape(len(exact), -(-exact.shape[1] // group))
    step = np.repeat(scales, group, axis=1)[:, : exact.shape[1]].astype(np.float64)
    assert (np.abs(tensor.numpy("f64") - exact) <= step * 0.50002).all()


@given(weights(), options())
def test_signed_codes_with_zero_points_stand_for_the_same_values(array: Array, chosen: dict[str, Any]) -> None:
    exact = array.astype(np.float32)
    way = {**chosen, "symmetric": False, "quantizer": "minmax", "zero_kind": "point"}
    plain, signed = (encode_tensor(CODEC, exact, {**way, "signed": flag}, dtype="f32") for flag in (False, True))
    assert plain.numpy().tobytes() == signed.numpy().tobytes()
    half = 2 ** (chosen["bits"] - 1)
    zeros, shifted = (tensor.parts["zeros"].array().astype(np.float32) for tensor in (plain, signed))
    assert np.array_equal(zeros - half, shifted)


@given(
    matrices(max_side=30), st.integers(1, 8), st.booleans(), st.lists(st.integers(0, 30), max_size=4), st.integers(0)
)
def test_flat_streams_decode_like_rows(
    shape: tuple[int, int], bits: int, signed: bool, cuts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = -(-shape[0] * shape[1] * bits // 8)
    packed = rng.integers(0, 256, size, np.uint8)  # spare bits of the last byte are anything
    codes = reference.from_flat(packed, shape, bits)
    options = {"bits": bits, "group": 7, "symmetric": False, "signed": signed}
    tensor = encode_tensor(CODEC, rng.normal(0, 1, shape).astype(np.float32), options, dtype="f32")
    rows = memory_part(reference.pack(codes, bits, msb=False), "u8")
    wanted = replace(tensor, parts={**tensor.parts, "packed_weight": rows}).numpy()
    params = {**tensor.params, "packing": "flat_lsb"}
    flat = replace(tensor, params=params, parts={**tensor.parts, "packed_weight": memory_part(packed, "u8")})
    assert flat.numpy().tobytes() == wanted.tobytes()
    assert read_rows(CODEC, flat, "f32", cuts).tobytes() == wanted.tobytes()
    compressed = replace(flat, parts={role: zstd_part(part) for role, part in flat.parts.items()})
    assert compressed.numpy().tobytes() == wanted.tobytes()
    longer = memory_part(np.zeros(size + 1, np.uint8), "u8")
    with pytest.raises(CodecError) as caught:
        CODEC.check(replace(flat, parts={**tensor.parts, "packed_weight": longer}))
    assert caught.value.rule == "affine.size"
