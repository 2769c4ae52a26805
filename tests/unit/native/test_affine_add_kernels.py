"""The kernel that adds decoded rows to a base: bit-equal to decoding, adding in f32 and rounding once."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.rows import add_rows, layout
from ingot.codecs.delta.base import delta_codec
from ingot.core.numeric.dtypes import as_bits, numpy_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.affine import NO_ZERO, OFFSETS, PER_TENSOR, POINTS, ROW, AffineLayout, Group
from ingot.model.tensor import Array
from ingot.testing.codecs import bits, encode_tensor
from tests.support.reference import affine as reference

FLOATS = ("f32", "f16", "bf16")


def parts(seed: int, rows: int, cols: int, params: AffineLayout, scale_dtype: str) -> tuple[Array, Array, Array | None]:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, params.row_bytes(cols)), np.uint8)
    shape = params.scale_shape(rows, cols)
    scales = rng.normal(0, 0.01, shape).astype(numpy_dtype(scale_dtype))
    zeros = rng.integers(0, 2 * 2**params.bits, shape) / 2 if params.zeros else None
    return packed, scales, None if zeros is None else zeros.astype(numpy_dtype(scale_dtype))


def expected(params: AffineLayout, packed: Array, scales: Array, zeros: Array | None, base: Array) -> Array:
    """The reference: each step in float32, one rounding by NumPy's own cast at the end."""
    rows, cols = base.shape
    codes = reference.unpack(packed, cols, params.bits, msb=params.msb)
    q = reference.values_of(codes, params.bits, signed=params.signed)
    group = np.arange(cols) // params.group_columns(cols)

    def spread(values: Array) -> Array:
        wide = values.astype(np.float32)
        if params.granularity == "tensor":
            return np.broadcast_to(wide, (rows, cols))
        return wide.reshape(rows, -1)[:, group]

    if params.offset and zeros is not None:
        difference = spread(scales) * q + spread(zeros)
    else:
        difference = spread(scales) * (q - spread(zeros) if zeros is not None else q)
    return (difference + base.astype(np.float32)).astype(base.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("cols", [1, 15, 64, 131, 2100])
def test_equals_the_reference(dtype: str, width: int, cols: int) -> None:
    for number, grid in enumerate((Group(32), Group(7), ROW, PER_TENSOR)):
        for signed, zero in product((True, False), (NO_ZERO, POINTS, OFFSETS)):
            packing = "rows_msb" if number % 2 else "rows_lsb"
            params = AffineLayout(width, grid, packing, signed, zero, "f32")
            packed, scales, zeros = parts(width + cols, 3, cols, params, FLOATS[number % 3])
            base = np.random.default_rng(cols).normal(0, 0.05, (3, cols)).astype(numpy_dtype(dtype))
            base[0, 0] = [np.inf, -0.0, np.nan, 0.0][number]
            wanted = expected(params, packed, scales, zeros, base)
            out = np.empty_like(base)
            add_rows(params, packed, scales, zeros, base, out)
            finite = ~np.isnan(wanted.astype(np.float32))
            assert bits(out[finite]) == bits(wanted[finite])
            assert np.isnan(out[~finite].astype(np.float32)).all()
            add_rows(params, packed, scales, zeros, base, base)
            assert bits(base) == bits(out)


@given(st.data())
def test_every_instruction_set_gives_the_same_bits(data: st.DataObject) -> None:
    width, cols = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 200))
    params = AffineLayout(width, Group(data.draw(st.integers(1, 200))), "rows_lsb", True, NO_ZERO, "f32")
    packed, scales, _ = parts(data.draw(st.integers(0, 99)), 2, cols, params, "f16")
    raw = data.draw(st.binary(min_size=4 * cols, max_size=4 * cols))
    base = np.frombuffer(raw, np.uint16).reshape(2, cols)  # any bf16, NaN and subnormal ones too
    found = []
    before = native.isa()
    try:
        for name in native.available_isas():
            native.set_isa(name)
            out = np.empty_like(base)
            at = layout(params, cols)
            native.kernels.affine_add(packed.reshape(-1), as_bits(scales), None, base, out, at, "f16", "bf16")
            found.append(out.tobytes())
    finally:
        native.set_isa(before)
    assert len(set(found)) == 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{"bits": 4, "group": 32}, {"bits": 1, "quantizer": "sign"}, {"bits": 8}], ids=str)
def test_a_delta_is_applied_in_place_as_decoded_and_added(dtype: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    tensor = encode_tensor(AffineCodec(), rng.normal(0, 0.01, (9, 70)).astype(np.float32), options, dtype="f32")
    base = rng.normal(0, 0.05, (9, 70)).astype(numpy_dtype(dtype))
    wanted = (tensor.numpy("f32") + base.astype(np.float32)).astype(base.dtype)
    applier = delta_codec("affine").applier(tensor, dtype)
    for start, stop in ((0, 4), (4, 4), (4, 9)):
        applier.apply(base[start:stop], base[start:stop])
    applier.finish()
    assert bits(base) == bits(wanted)


def test_a_difference_past_the_range_is_refused_as_it_is_by_decoding() -> None:
    params = AffineLayout(8, ROW, "rows_lsb", True, NO_ZERO, "f32")
    packed, scales = np.full((1, 4), 0x7F, np.uint8), np.full(1, 3e38, np.float32)
    base = np.zeros((1, 4), np.float32)
    with pytest.raises(CodecError) as caught:
        add_rows(params, packed, scales, None, base, base)
    assert caught.value.rule == "affine.overflow"


def test_arrays_that_overlap_are_no_base_and_output() -> None:
    at = layout(AffineLayout(8, ROW, "rows_lsb", True, NO_ZERO, "f32"), 4)
    both = np.zeros((3, 4), np.float32)
    packed, scales = np.zeros(8, np.uint8), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="apart"):
        native.kernels.affine_add(packed, scales, None, both[:2], both[1:], at, "f32", "f32")
    with pytest.raises(ValueError, match="base of rows x cols"):
        native.kernels.affine_add(packed, scales, None, both, np.zeros((2, 4), np.float32), at, "f32", "f32")
