"""Attributes beyond the plain matrix: offsets, a constant zero point, another matrix, blocks; and what is refused."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.offset import offsets
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError
from ingot.ext.squizd.carry import why_unsupported
from ingot.model.part import memory_part
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import encode_tensor, read_rows, repacks, zstd_part
from tests.support.reference import affine as reference

CODEC = AffineCodec()
BASE = {"codec_version": 1, "axis": -1, "packing": "rows_lsb", "signed": False, "zeros": False, "dtype": "f32"}


def tensor_of(codes: Array, scales: Array, zeros: Array | None = None, **params: Any) -> Tensor:
    """A tensor of these codes (its shape is theirs); packed as the attributes say."""
    shape, bits = codes.shape, params["bits"]
    if params.get("packing") == "flat_lsb":
        packed = reference.pack(codes.reshape(1, -1), bits, msb=False)
    else:
        rows, cols = params.get("matrix") or (prod(shape[:-1]), shape[-1] if shape else 1)
        packed = reference.pack(codes.reshape(rows, cols), bits, msb=False)
    parts = {"packed_weight": memory_part(packed, "u8"), "scales": memory_part(scales, "f32")}
    if zeros is not None:
        parts["zeros"] = memory_part(zeros, "f32")
    return Tensor("w", shape, "f32", CODEC.id, parts, {**BASE, "zeros": zeros is not None, **params}, decoder=CODEC)


def numbers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(0, 0.1, shape).astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Array]:
    """A tensor with any of the attributes, and its values by plain NumPy over the expanded scales."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    counts = draw(st.lists(st.integers(1, 4), min_size=len(block), max_size=len(block)))
    shape = tuple(step * count for step, count in zip(block, counts, strict=True))
    bits, signed = draw(st.integers(1, 8)), draw(st.booleans())
    codes = rng.integers(0, 2**bits, shape, np.uint8)
    q = reference.values_of(codes, bits, signed=signed)
    kind = draw(st.sampled_from(("none", "point", "offset", "constant")))
    params: dict[str, Any] = {"bits": bits, "signed": signed}
    if draw(st.booleans()):
        params |= {"granularity": "blocks", "block": block, "packing": draw(st.sampled_from(("rows_lsb", "flat_lsb")))}
        spread = lambda some: np.kron(some.reshape(counts), np.ones(block, np.float32))  # noqa: E731
        count = prod(counts)
    else:
        rows = draw(st.sampled_from([n for n in range(1, q.size + 1) if q.size % n == 0]))
        cols = q.size // rows
        group = draw(st.integers(1, cols))
        params |= {"granularity": "group", "group_size": group, "matrix": [rows, cols]}
        params["packing"] = draw(st.sampled_from(("rows_lsb", "flat_lsb")))
        count = rows * -(-cols // group)
        spread = lambda some: np.repeat(some.reshape(rows, -1), group, 1)[:, :cols].reshape(shape)  # noqa: E731
    scales = numbers(rng, count)
    zeros = numbers(rng, count) if kind in ("point", "offset") else None
    if kind == "constant":
        params["zero_point"] = draw(st.integers(0, 2**bits - 1)) - (1 << (bits - 1) if signed else 0)
        values = spread(scales) * (q - np.float32(params["zero_point"]))
    elif kind == "offset":
        params["zero_kind"] = "offset"
        values = spread(scales) * q + spread(zeros)
    else:
        values = spread(scales) * (q if zeros is None else q - spread(zeros))
    return tensor_of(codes, scales, zeros, **params), values


@given(cases(), st.lists(st.integers(0, 20), max_size=4), st.sampled_from(("f32", "bf16", "f16")), st.booleans())
def test_decoding_equals_numpy(case: tuple[Tensor, Array], cuts: list[int], dtype: str, packed: bool) -> None:
    tensor, values = case
    if packed:
        tensor.parts = {role: zstd_part(part) for role, part in tensor.parts.items()}
    wanted = values.astype(numpy_dtype(dtype)).tobytes()
    assert tensor.numpy(dtype).tobytes() == wanted
    assert read_rows(CODEC, tensor, dtype, cuts).tobytes() == wanted


@given(cases())
def test_repacks_are_exact(case: tuple[Tensor, Array]) -> None:
    """What a repack states decodes to the same bits; layouts that cannot be repacked offer none."""
    tensor, values = case
    for repack in repacks(CODEC, tensor):
        if not repack.exact:
            continue
        reader = repack.reader()
        found = reader.read(repack.rows)
        reader.finish()
        parts = {spec.role: memory_part(found[spec.role], spec.dtype) for spec in repack.parts}
        again = Tensor("w", tensor.shape, "f32", CODEC.id, parts, dict(repack.layout.attributes()), decoder=CODEC)
        assert again.numpy().tobytes() == values.tobytes()


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.booleans(), st.sampled_from(("f16", "bf16")), st.booleans())
def test_integers_become_those_with_offsets(seed: int, bits: int, symmetric: bool, scales: str, hard: bool) -> None:
    """As MLX has them; only where every value keeps its bits."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (3, 64)) * 2.0 ** rng.integers(-20 if hard else -3, 3, (3, 1))
    options = {"bits": bits, "group": 32, "symmetric": symmetric, "scales": scales}
    tensor = encode_tensor(CODEC, values.astype(np.float32), options, dtype="f32")
    found = [repack for repack in repacks(CODEC, tensor) if repack.layout.attributes().get("zero_kind") == "offset"]
    assert [part.dtype for repack in found for part in repack.parts[1:2]] == [scales, "f32"]
    own, wide = found
    assert own.exact or hard or not symmetric or bits == 8
    assert wide.exact or not symmetric  # an offset has at most 11 bits of the scale and 8 of the point
    for repack in (repack for repack in found if repack.exact):
        parts = repack.reader().read(3)
        made = {spec.role: memory_part(parts[spec.role], spec.dtype) for spec in repack.parts}
        again = Tensor("w", tensor.shape, "f32", CODEC.id, made, dict(repack.layout.attributes()), decoder=CODEC)
        assert again.numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    ("scale", "zero", "fits"),
    [(0.5, 8, True), (0.0, 8, True), (-0.5, 8, True), (np.inf, 8, False), (60000.0, 8, False), (0.1, 7, False)],
)
def test_offsets_that_would_be_rounded_are_none(scale: float, zero: float, fits: bool) -> None:
    arrays = np.array([scale], np.float16), np.array([zero], np.float16)
    assert (offsets(*arrays) is not None) == fits


def test_flat_groups_that_fit_the_rows_are_plain_groups() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 8, (3, 128), np.uint8)
    tensor = tensor_of(codes, numbers(rng, 6), bits=3, granularity="row", matrix=[6, 64], zero_point=3)
    repack = next(iter(repacks(CODEC, tensor)))
    assert repack.layout.attributes()["granularity"] == "group"
    assert repack.layout.attributes()["group_size"] == 64
    assert "matrix" not in repack.layout.attributes()


def test_a_constant_zero_point_becomes_a_part_with_the_other_sign() -> None:
    """As ``.squizd`` wants INT4: two's complement, zero points in the table."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 15, (4, 16), np.uint8)
    tensor = tensor_of(codes, numbers(rng, 8), bits=4, granularity="group", group_size=8, zero_point=7)
    found = [repack.layout.attributes() for repack in repacks(CODEC, tensor)]
    assert any(params["signed"] and params["zeros"] and "zero_point" not in params for params in found)


@pytest.mark.parametrize(
    "change",
    [
        {"zero_kind": "offset"},
        {"zero_kind": "slope"},
        {"zero_kind": 1},
        {"zero_point": 16},
        {"zero_point": -1},
        {"zero_point": 1.0},
        {"zero_point": True},
        {"zero_point": 8, "signed": True},
        {"matrix": [2, 15]},
        {"matrix": [2, 2, 8]},
        {"matrix": [-4, -8]},
        {"matrix": [2**40, 2**40]},
        {"matrix": 32},
        {"matrix": [True, 32]},
        {"matrix": [2.0, 16]},
        {"matrix": None},
        {"granularity": "blocks"},
        {"granularity": "blocks", "block": [3, 8]},
        {"granularity": "blocks", "block": [4]},
        {"granularity": "blocks", "block": [0, 8]},
        {"granularity": "blocks", "block": [4, 8], "matrix": [4, 8]},
        {"block": [4, 8]},
    ],
    ids=str,
)
def test_impossible_attributes_are_refused(change: dict[str, Any]) -> None:
    tensor = tensor_of(np.zeros((4, 8), np.uint8), np.ones(4, np.float32), bits=4, granularity="row")
    tensor.params = {**tensor.params, **change}
    with pytest.raises(CodecError) as found:
        CODEC.check(tensor)
    assert found.value.rule == "affine.params"


def test_a_zero_point_beside_zero_points_is_refused() -> None:
    ones = np.ones(4, np.float32)
    tensor = tensor_of(np.zeros((4, 8), np.uint8), ones, ones, bits=4, granularity="row", zero_point=1)
    with pytest.raises(CodecError, match="zero_point"):
        CODEC.check(tensor)


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"granularity": "blocks", "block": [2, 4]}, 3),
        ({"granularity": "row", "matrix": [8, 4]}, 4),
        ({"granularity": "blocks", "block": [2, 4]}, 5),
    ],
)
def test_scales_of_another_size_are_refused(params: dict[str, Any], count: int) -> None:
    tensor = tensor_of(np.zeros((4, 8), np.uint8), np.ones(count, np.float32), bits=4, **params)
    with pytest.raises(CodecError) as found:
        CODEC.check(tensor)
    assert found.value.rule == "affine.size"


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"zero_kind": "offset"}, "Offsets"),
        ({"zero_point": 1}, "Constant"),
        ({"matrix": [8, 4]}, "matrix"),
        ({"granularity": "blocks", "block": [1, 8]}, "blocks"),
    ],
)
def test_squizd_names_what_it_cannot_carry(params: dict[str, Any], word: str) -> None:
    zeros = np.ones(4, np.float32) if "zero_kind" in params else None
    codes = np.zeros((4, 8), np.uint8)
    known = {"bits": 4, "granularity": "row", "signed": True, **params}
    spec: TensorSpec = tensor_of(codes, np.ones(8 if "matrix" in params else 4, np.float32), zeros, **known).spec()
    reason = why_unsupported(spec)
    assert reason is not None
    assert word in reason
