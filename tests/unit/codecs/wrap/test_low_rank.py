"""Products of two thin matrices: the suite, and what only this codec promises."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.wrap.low_rank import LowRankCodec
from ingot.codecs.wrap.low_rank_fit import factors
from ingot.core.numeric.dtypes import float_name, numpy_dtype
from ingot.errors import CodecError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, encode_tensor

CODEC = LowRankCodec()


class TestLowRank(CodecSuite):
    codec = LowRankCodec()
    cases = (
        *(Case((12, 30), dtype, {"rank": 12}) for dtype in ("f32", "f16", "bf16")),
        *(Case((40, 9), "f32", {"rank": 9, "factors": kind}) for kind in ("f32", "f16", "bf16")),
        *(Case(shape, "f32", {}) for shape in ((), (1,), (7,), (0,), (0, 3), (3, 0), (2, 3, 10))),
        Case((60, 70), "bf16", {"error": 0.3}),
    )
    min_snr_db = 9.0


def product(rows: int, cols: int, rank: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 0.1, (rows, rank)) @ rng.normal(0, 0.1, (rank, cols))).astype(np.float32)


def encode(array: Array, **options: Any) -> Tensor:
    return encode_tensor(CODEC, array, options, dtype=float_name(array))


def error(tensor: Tensor, array: Array) -> float:
    return float(np.linalg.norm(tensor.numpy("f32") - array) / np.linalg.norm(array))


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (64, 64)])
@pytest.mark.parametrize("rank", [1, 8, 20])
def test_the_rank_is_found(shape: tuple[int, int], rank: int) -> None:
    array = product(*shape, rank)
    tensor = encode(array, error=1e-3)
    assert tensor.params["rank"] == rank
    assert error(tensor, array) < 1.2e-3


def test_the_rank_is_found_under_the_noise_of_rounding() -> None:
    """What a merged adapter leaves in a bf16 model: difference of the rounded weights."""
    rng = np.random.default_rng(3)
    base = rng.normal(0, 0.02, (400, 600)).astype(numpy_dtype("bf16"))
    adapter = product(400, 600, 8) * np.float32(0.2)
    tuned = (base.astype(np.float32) + adapter).astype(base.dtype)
    difference = tuned.astype(np.float32) - base.astype(np.float32)
    noise = float(np.linalg.norm(difference - adapter) / np.linalg.norm(difference))
    tensor = encode(difference, error=1.05 * noise)
    assert tensor.params["rank"] == 8
    assert error(tensor, adapter) < noise / 2


def test_it_is_as_good_as_the_singular_value_decomposition() -> None:
    array = np.random.default_rng(4).normal(0, 1, (400, 300)).astype(np.float32) * np.linspace(2, 0.01, 300) ** 2
    array = array.astype(np.float32)
    values = np.linalg.svd(array.astype(np.float64), compute_uv=False)
    best = np.sqrt(np.square(values[16:]).sum() / np.square(values).sum())
    assert error(encode(array, rank=16, factors="f32"), array) < 1.01 * best


def test_a_matrix_of_zeros_has_rank_zero() -> None:
    tensor = encode(np.zeros((200, 300), np.float32))
    assert tensor.params["rank"] == 0
    assert tensor.nbytes == 0
    assert not tensor.numpy().any()


def test_factors_do_not_depend_on_the_number_of_threads() -> None:
    code = (
        "import numpy as np, hashlib;from ingot.codecs.wrap.low_rank import LowRankCodec;"
        "a=np.random.default_rng(0).normal(0,1,(700,900)).astype(np.float32);"
        "e=LowRankCodec().encoder(a.shape,'f32',{'rank':16});e.fit_pass(a);p=e.encode(a);"
        "print(hashlib.sha256(p['left'].tobytes()+p['right'].tobytes()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for threads in ("1", "2", "3")
    }
    assert len(found) == 1


@pytest.mark.parametrize("rank", [-1, 5, True, "2", None])
def test_a_rank_that_cannot_be_is_refused(rank: object) -> None:
    tensor = encode(product(4, 6, 2), rank=2)
    with pytest.raises(CodecError) as caught:
        CODEC.check(replace(tensor, params={**tensor.params, "rank": rank}))
    assert caught.value.rule == "low_rank.params"


@pytest.mark.parametrize("options", [{"rank": -1}, {"rank": 1.5}, {"error": 1}, {"error": "x"}, {"factors": "f64"}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4, 4), "f32", options)
    assert caught.value.rule == "low_rank.option"


def test_what_has_no_factors_is_refused() -> None:
    array = product(5, 5, 1)
    array[2, 2] = np.nan
    with pytest.raises(CodecError) as caught:
        encode(array)
    assert caught.value.rule == "low_rank.non-finite"
    with pytest.raises(CodecError) as caught:
        encode(np.full((4, 4), 1e30, np.float32), factors="f16")
    assert caught.value.rule == "low_rank.overflow"


def stored(left: Array, right: Array, dtype: str = "f32") -> Tensor:
    """A tensor of these factors."""
    params = {"codec_version": 1, "rank": len(right), "dtype": dtype}
    parts = {"left": memory_part(left, float_name(left)), "right": memory_part(right, float_name(right))}
    return Tensor("t", (len(left), right.shape[1]), dtype, "low_rank", parts, params, CODEC)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("size", "dtype"), [(1e20, "f32"), (3e19, "bf16"), (300.0, "f16")])
def test_products_past_the_type_asked_for_are_refused_and_never_infinite(size: float, dtype: str) -> None:
    ones = np.ones((3, 1), np.float32)
    tensor = stored(ones * np.float32(size), ones.T * np.float32(size))
    with pytest.raises(CodecError) as caught:
        tensor.numpy(dtype)
    assert caught.value.rule == "low_rank.overflow"
    assert caught.value.where == "t"
    half = stored(ones * np.float32(size), ones.T * np.float32(size / 2**100))
    assert np.isfinite(half.numpy(dtype).astype(np.float32)).all()


@pytest.mark.filterwarnings("error")
def test_factors_that_are_not_finite_decode_as_they_say() -> None:
    left, right = np.ones((3, 2), np.float32), np.ones((2, 4), np.float32)
    left[1, 0], right[1, 2] = np.inf, np.nan
    decoded = stored(left, right).numpy()
    assert np.isposinf(decoded[1, [0, 1, 3]]).all()
    assert np.isnan(decoded[:, 2]).all()
    assert (decoded[[0, 2]][:, [0, 1, 3]] == 2).all()


@pytest.mark.filterwarnings("error")
def test_what_would_not_decode_is_not_encoded() -> None:
    largest = np.full((4, 4), np.finfo(np.float32).max)
    with pytest.raises(CodecError) as caught:
        encode(largest, factors="bf16")
    assert caught.value.rule == "low_rank.overflow"
    array = np.full((4, 4), 65504, np.float16)
    with pytest.raises(CodecError) as caught:
        encode(array, factors="bf16")
    assert caught.value.rule == "low_rank.overflow"
    assert np.isfinite(encode(array, factors="f32").numpy()).all()


@pytest.mark.parametrize(("terms", "total"), [((1e8, -1e8, 1), 1), ((1, 1e8, -1e8), 0), ((1e8, 1, -1e8), 0)])
def test_terms_are_added_in_order(terms: tuple[float, ...], total: float) -> None:
    right = np.repeat(np.array(terms, np.float32)[:, None], 3, axis=1)
    assert (stored(np.ones((3, 3), np.float32), right).numpy() == total).all()


def test_the_largest_element_of_each_vector_of_left_is_positive() -> None:
    left = factors(product(30, 40, 4), 4, None)[0]
    at = np.abs(left).argmax(axis=0)
    assert (left[at, range(4)] > 0).all()
    mirrored = factors(-product(30, 40, 4), 4, None)
    assert (mirrored[0][np.abs(mirrored[0]).argmax(axis=0), range(4)] > 0).all()
