"""Palettes and masks on shapes nobody thought of: reader and decoder agree, and bad input is refused by a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError, IngotError
from ingot.model.layouts.palette import BITS, LEGAL_VECTORS, VECTOR_SIZES, require_vector_size
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import bits, encode_tensor, read_rows
from tests.support.reference import palette as reference

PALETTE, MASK = CODECS["palette"], CODECS["sparse_mask"]


@st.composite
def palettes(draw: st.DrawFn) -> Tensor:
    """Any palette that Core ML's operator could describe: codebooks along several axes, vectors along any."""
    index = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    groups = [draw(st.sampled_from([one for one in range(1, size + 1) if size % one == 0])) for size in index]
    size, axis = draw(st.sampled_from(VECTOR_SIZES)), draw(st.integers(0, len(index) - 1))
    width, entries = draw(st.sampled_from(BITS)), draw(st.sampled_from(["f16", "f32", "bf16", "i8", "u8"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = rng.integers(0, 2**width, prod(index)).astype(np.uint8)
    codebook = rng.normal(0, 50, prod(groups) * 2**width * size)
    codebook = np.abs(codebook) if entries == "u8" else codebook
    parts = {
        "indices": memory_part(reference.pack(codes, width), "u8"),
        "codebook": memory_part(codebook.astype(numpy_dtype(entries)), entries),
    }
    if draw(st.booleans()):
        parts["codebook_scales"] = memory_part(rng.normal(0, 1, prod(groups)).astype(np.float16), "f16")
    params = {"bits": width, "groups": groups, "vector_size": size, "vector_axis": axis, "dtype": "f16"}
    shape = tuple(length * size if at == axis else length for at, length in enumerate(index))
    return Tensor("t", shape, "f16", "palette", parts, {"codec_version": 1, **params}, PALETTE)


@settings(deadline=None, max_examples=80)
@given(tensor=palettes(), cuts=st.lists(st.integers(1, 40), max_size=4), dtype=st.sampled_from(["f32", "f16", "bf16"]))
def test_decoding_is_the_reference(tensor: Tensor, cuts: list[int], dtype: str) -> None:
    arrays = {role: part.array() for role, part in tensor.parts.items()}
    wanted = reference.decode(arrays, tensor.params, tensor.shape).astype(numpy_dtype(dtype))
    assert bits(tensor.numpy(dtype)) == bits(wanted)
    assert bits(read_rows(PALETTE, tensor, dtype, cuts)) == bits(wanted)


@given(value=st.one_of(st.integers(-2, 300), st.sampled_from([2**64, 1.0, True, "2", None])))
def test_vector_sizes_are_those_of_the_mask_that_can_be_written(value: Any) -> None:
    legal = type(value) is int and 0 <= value <= 5 and LEGAL_VECTORS >> value & 1 and value & (value - 1) == 0
    if legal:
        assert require_vector_size(value) == value
        return
    with pytest.raises(CodecError) as caught:
        require_vector_size(value)
    assert caught.value.rule == "palette.vector-size"


@settings(deadline=None, max_examples=100)
@given(
    tensor=palettes(),
    key=st.sampled_from(["codec_version", "bits", "groups", "vector_size", "vector_axis", "dtype", "scales"]),
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3)),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=4,
    ),
)
def test_strange_attributes_decode_or_are_refused(tensor: Tensor, key: str, value: Any) -> None:
    strange = replace(tensor, params={**tensor.params, key: value})
    rule = _refusal(lambda: PALETTE.check(strange))
    if rule is None:
        rule = _refusal(lambda: PALETTE.decode(strange, "f32"))
        assert rule in (None, "palette.padding", "palette.overflow")
    assert rule is None or rule.startswith("palette.")


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 20), max_size=3),
    cuts=st.lists(st.integers(1, 40), max_size=4),
    dtype=st.sampled_from(["f16", "bf16", "f32"]),
    options=st.sampled_from(
        [
            {},
            {"sparsity": 0.6},
            {"threshold": 0.5},
            {"inner": "palette", "options": {"bits": 3, "group": 2}},
            {"inner": "affine", "options": {"bits": 8}, "sparsity": 0.3},
            {"inner": "affine", "options": {"bits": 4, "group": 3}},
        ]
    ),
    seed=st.integers(0, 2**32),
)
def test_masks_read_and_decode_alike(
    shape: list[int], cuts: list[int], dtype: str, options: dict[str, Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    source = np.asarray(rng.normal(0, 1, shape) * rng.integers(0, 2, shape)).astype(numpy_dtype(dtype))
    tensor = encode_tensor(MASK, source, options, dtype=dtype, cuts=cuts)
    found = tensor.numpy()
    assert bits(read_rows(MASK, tensor, dtype, cuts)) == bits(found)
    assert int(np.count_nonzero(np.unpackbits(tensor.parts["mask"].array()))) == tensor.params["nnz"]
    assert not found[source == 0].any()
    if not options:
        assert bits(found) == bits(source)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), codec=st.sampled_from(["dense", "palette", "affine"]))
def test_damaged_masks_are_refused_or_decode(data: st.DataObject, codec: str) -> None:
    source = np.random.default_rng(1).normal(0, 1, (7, 9)).astype(np.float16)
    tensor = encode_tensor(MASK, source, {"inner": codec, "sparsity": 0.5}, dtype="f16")
    role = data.draw(st.sampled_from(["mask", "nonzeros"]))
    raw = bytearray(tensor.parts[role].view())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    damaged = np.frombuffer(raw, np.uint8)
    bad = replace(tensor, parts={**tensor.parts, role: memory_part(damaged, tensor.parts[role].dtype)})
    rule = _refusal(lambda: MASK.decode(bad, "f16"))
    if role == "mask" and int(np.count_nonzero(np.unpackbits(damaged))) != tensor.params["nnz"]:
        assert rule in ("sparse_mask.popcount", "sparse_mask.padding")
    assert rule in (None, "sparse_mask.popcount", "sparse_mask.padding")


def _refusal(call: Callable[[], object]) -> str | None:
    """Return the rule by which a call was refused; None where it was not."""
    try:
        call()
    except IngotError as error:
        return error.rule
    return None
