"""Any integers in any layout: what is repacked decodes to the same bits; the rest cannot be shifted."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.affine.codec import AffineCodec
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import repacked, repacks
from ingot.testing.values import random_bits
from tests.support.reference import affine as reference
from tests.support.strategies import matrices

CODEC = AffineCodec()
WORDS = ("8", "16", "32", "64")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, str, bool, str | int]:
    """Bits, packing, whether codes are signed, what shares a scale."""
    bits = draw(st.integers(1, 8))
    words = [f"{int(size) // bits}_per_{kind}{size}" for size in WORDS for kind in "iu" if int(size) % bits == 0]
    packing = draw(st.sampled_from(["rows_lsb", "rows_msb", "flat_lsb", *words]))
    group = draw(st.integers(1, 40))
    if "_per_" in packing:
        return bits, packing, False, group
    return bits, packing, draw(st.booleans()), draw(st.sampled_from(("row", "tensor", group)))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits in every part, spare bits of the codes included."""
    shape, (bits, packing, signed, group) = draw(matrices(max_side=34)), draw(layouts())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale_dtype = draw(st.sampled_from(("f32", "f16", "bf16")))
    kind = draw(st.sampled_from(("none", "integers", "fractions", "anything")))
    plain = {"bits": bits, "packing": packing}
    if "_per_" in packing:
        params = {**plain, "group_size": group, "dtype": "f32"}
    else:
        granularity = (
            {"granularity": group} if isinstance(group, str) else {"granularity": "group", "group_size": group}
        )
        params = {"codec_version": 1, **plain, **granularity, "axis": -1, "signed": signed, "zeros": kind != "none"}
        params["dtype"] = "f32"
    parts = {"zeros": memory_part(np.empty(0, np.uint8), scale_dtype)} if kind != "none" else {}
    known = AffineLayout.from_tensor(Tensor("tensor", shape, "f32", "affine", parts, params))
    packed = rng.integers(0, 256, known.packed_bytes(*shape), np.uint8)
    count = known.scale_shape(*shape)
    found = {"packed_weight": memory_part(packed, known.packed_dtype)}
    found["scales"] = memory_part(random_bits(rng, count, scale_dtype), scale_dtype)
    if kind != "none":
        found["zeros"] = memory_part(zeros(rng, kind, count, scale_dtype), scale_dtype)
    return Tensor("tensor", shape, "f32", "affine", found, params, CODEC)


def zeros(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: str) -> Array:
    if kind == "anything":
        return random_bits(rng, shape, dtype)
    values = rng.integers(-256, 257, shape) if kind == "integers" else rng.normal(0, 4, shape)
    return values.astype(numpy_dtype(dtype))


def decoded(tensor: Tensor, *, signs: bool = True) -> bytes | str:
    """Return the values' bytes, or the rule that refuses them; without ``signs`` every zero counts as +0."""
    try:
        values = tensor.numpy("f32")
        return (values if signs else values + np.float32(0)).tobytes()
    except CodecError as error:
        return error.rule or ""


def shiftable(tensor: Tensor, delta: int, dtype: str) -> bool:
    """Whether every zero point plus delta is a number of the type, by rational arithmetic."""
    for value in wide_zeros(tensor).tolist():
        if not np.isfinite(value):
            return False
        exact = Fraction(value) + delta
        with np.errstate(over="ignore"):
            rounded = np.float64(float(exact)).astype(numpy_dtype(dtype)).astype(np.float64)
        if not np.isfinite(rounded) or Fraction(float(rounded)) != exact:
            return False
    return True


@given(tensors(), st.lists(st.integers(0, 34), max_size=4))
def test_re_laid_tensors_decode_to_the_same_bits(tensor: Tensor, cuts: list[int]) -> None:
    CODEC.check(tensor)
    stored, wanted = AffineLayout.from_tensor(tensor), decoded(tensor)
    found = repacks(CODEC, tensor)
    assert {repack.layout.signed for repack in found} == {False, True}
    for repack in found:
        delta = 0
        if repack.layout.signed != stored.signed:
            delta = (-1 if repack.layout.signed else 1) << stored.bits - 1
        if repack.layout.offset:
            if repack.exact:
                other = repacked(repack, tensor, cuts)
                CODEC.check(other)
                assert decoded(other, signs=False) == decoded(tensor, signs=False)
            continue
        if not repack.exact and not repack.layout.zeros:  # one for all codes
            points = wide_zeros(tensor) if stored.zeros else np.array([stored.zero_point or 0])
            assert not points.size or (points != (repack.layout.zero_point or 0) - delta).any()
            continue
        if not repack.exact:
            assert delta
            assert not shiftable(tensor, delta, repack.layout.scales) or far(tensor)
            continue
        other = repacked(repack, tensor, cuts)
        CODEC.check(other)
        assert decoded(other) == wanted
        assert AffineLayout.from_tensor(other) == repack.layout
        check_codes(other, delta, tensor)
        assert repack.layout.packing in ("rows_lsb", "flat_lsb")


def far(tensor: Tensor) -> bool:
    """Whether a zero point is so large that it is refused unseen."""
    return bool((np.abs(wide_zeros(tensor)) > 2**40).any())


def wide_zeros(tensor: Tensor) -> Array:
    with np.errstate(invalid="ignore"):
        return tensor.parts["zeros"].array().astype(np.float64)


def codes_of(tensor: Tensor) -> Array:
    params, (rows, cols) = AffineLayout.from_tensor(tensor), tensor.matrix_shape
    packed = np.frombuffer(tensor.parts["packed_weight"].view(), np.uint8)
    if params.packing == "flat_lsb":
        return reference.from_flat(packed, (rows, cols), params.bits)
    matrix = packed.reshape(rows, params.row_bytes(cols))
    return reference.unpack(matrix, cols, params.bits, msb=params.msb)


def check_codes(other: Tensor, delta: int, source: Tensor) -> None:
    """Every integer is the source's plus delta, and spare bits are 0."""
    bits, target = AffineLayout.from_tensor(source).bits, AffineLayout.from_tensor(other)
    before = reference.values_of(codes_of(source), bits, signed=AffineLayout.from_tensor(source).signed)
    after = codes_of(other)
    assert np.array_equal(reference.values_of(after, bits, signed=target.signed), before + delta)
    if target.packing == "rows_lsb":
        assert bytes(other.parts["packed_weight"].view()) == reference.pack(after, bits, msb=False).tobytes()
    elif after.size * bits % 8:
        assert other.parts["packed_weight"].view()[-1] >> after.size * bits % 8 == 0
