"""Round trips of the lossless codecs over any shape, dtype and bits, however the rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ingot.codecs.cast import cast
from ingot.codecs.table import CODECS
from ingot.errors import CodecError
from ingot.testing.codecs import bits, encode_tensor, read_rows, round_once, zstd_part
from tests.support.strategies import FLOATS, arrays, dtypes, matrices, shapes

CUTS = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@given(st.data(), shapes(), dtypes(), CUTS)
def test_dense(data: st.DataObject, shape: tuple[int, ...], dtype: str, cuts: tuple[int, ...]) -> None:
    source = data.draw(arrays(shape, dtype))
    tensor = encode_tensor(CODECS["dense"], source, dtype=dtype, cuts=cuts)
    assert bits(tensor.numpy()) == bits(source)
    assert bits(read_rows(CODECS["dense"], tensor, dtype, cuts)) == bits(source)


@given(st.data(), matrices(), dtypes(), CUTS, st.booleans())
def test_sparse_csr(
    data: st.DataObject, shape: tuple[int, int], dtype: str, cuts: tuple[int, ...], compressed: bool
) -> None:
    source = data.draw(arrays(shape, dtype, sparse=True))
    tensor = encode_tensor(CODECS["sparse_csr"], source, dtype=dtype)
    if compressed:
        tensor.parts = {role: zstd_part(part) for role, part in tensor.parts.items()}
    assert bits(tensor.numpy()) == bits(source)
    assert bits(read_rows(CODECS["sparse_csr"], tensor, dtype, cuts)) == bits(source)


@given(st.data(), shapes(), dtypes(), CUTS)
def test_sparse_coo(data: st.DataObject, shape: tuple[int, ...], dtype: str, cuts: tuple[int, ...]) -> None:
    source = data.draw(arrays(shape, dtype, sparse=True))
    tensor = encode_tensor(CODECS["sparse_coo"], source, dtype=dtype)
    assert bits(tensor.numpy()) == bits(source)
    assert bits(read_rows(CODECS["sparse_coo"], tensor, dtype, cuts)) == bits(source)


@given(st.data(), st.integers(0, 200), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_float_casts_round_once_or_refuse(data: st.DataObject, size: int, source: str, target: str) -> None:
    values = data.draw(arrays((size,), source))
    with np.errstate(all="ignore"):  # signalling NaNs
        wide = values.astype(np.float64)
        finite = np.isfinite(wide)
        if not (np.abs(wide[finite]) <= largest(target)).all():
            values = np.clip(wide, -1, 1).astype(values.dtype)
            wide, finite = values.astype(np.float64), ~np.isnan(wide)
        found = cast(values, target)
        np.testing.assert_array_equal(np.isnan(wide), np.isnan(found))
        np.testing.assert_array_equal(found[np.isinf(wide)].astype(np.float64), wide[np.isinf(wide)])
    assert bits(found[finite]) == bits(round_once(wide[finite], target))


@given(
    st.data(), st.integers(50, 200), st.sampled_from(["f64", "f32", "bf16"]), st.sampled_from(["f32", "f16", "bf16"])
)
def test_a_value_past_the_range_is_refused(data: st.DataObject, size: int, source: str, target: str) -> None:
    values = data.draw(arrays((size,), source))
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    past = np.isfinite(wide) & (np.abs(wide) >= 2.0 * largest(target))
    assume(past.any())
    with pytest.raises(CodecError) as caught:
        cast(values, target)
    assert caught.value.rule == "dense.overflow"


def largest(dtype: str) -> float:
    return {"f64": np.finfo(np.float64).max, "f32": float(np.finfo(np.float32).max), "f16": 65504.0, "bf16": 3.3895e38}[
        dtype
    ]
