"""Any weights, any options: slabs change nothing, codes equal the reference, errors stay within half a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.affine import AffineCodec
from ingot.core.dtypes import numpy_dtype
from ingot.model.tensor import Array
from ingot.testing.codecs import encode_tensor, read_rows
from ingot.testing.reference import affine as reference
from ingot.testing.reference.affine import Grid
from ingot.testing.strategies import FLOATS, matrices

CODEC = AffineCodec()


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    symmetric = draw(st.booleans())
    return {
        "bits": draw(st.integers(2 if symmetric else 1, 8)),
        "group": draw(st.one_of(st.integers(1, 50), st.sampled_from(("row", "tensor")))),
        "symmetric": symmetric,
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
def test_slabs_change_nothing_and_codes_equal_the_reference(
    array: Array, chosen: dict[str, Any], cuts: list[int]
) -> None:
    dtype = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}[array.dtype.name]
    whole = encode_tensor(CODEC, array, chosen, dtype=dtype)
    cut = encode_tensor(CODEC, array, chosen, dtype=dtype, cuts=cuts)
    for role, part in whole.parts.items():
        assert bytes(part.view()) == bytes(cut.parts[role].view()), role
    assert read_rows(CODEC, whole, "f32", cuts).tobytes() == whole.numpy("f32").tobytes()
    if array.size:
        check_reference(array, chosen, whole.parts["packed_weight"].view(), whole.parts["scales"].array())


def check_reference(array: Array, chosen: dict[str, Any], packed: memoryview, scales: Array) -> None:
    group = array.shape[1] if isinstance(chosen["group"], str) else chosen["group"]
    grid = Grid(
        chosen["bits"],
        group,
        chosen["symmetric"],
        chosen["scales"],
        search=chosen["quantizer"] == "mse",
        per_tensor=chosen["group"] == "tensor",
    )
    codes, wanted, _ = reference.quantize(array, grid)
    assert scales.tobytes() == wanted.tobytes()
    assert bytes(packed) == reference.pack(codes, grid.bits, msb=chosen["bit_order"] == "msb").tobytes()


@given(weights(), st.integers(2, 8), st.integers(1, 50), st.booleans())
def test_error_is_at_most_half_a_step(array: Array, bits: int, group: int, symmetric: bool) -> None:
    chosen = {"bits": bits, "group": group, "symmetric": symmetric, "scales": "f32"}
    exact = array.astype(np.float32)
    tensor = encode_tensor(CODEC, exact, chosen, dtype="f32")
    scales = tensor.parts["scales"].array().reshape(len(exact), -(-exact.shape[1] // group))
    step = np.repeat(scales, group, axis=1)[:, : exact.shape[1]].astype(np.float64)
    assert (np.abs(tensor.numpy("f64") - exact) <= step * 0.50002).all()
