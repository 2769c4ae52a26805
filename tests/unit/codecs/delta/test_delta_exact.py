"""The codec delta_exact: every type and bit pattern, any runs of rows, in place, its modes, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.delta.base import delta_codec
from ingot.codecs.delta.exact import ExactDelta
from ingot.codecs.delta.exact_chunks import CHUNK, pack, unpack
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Unreadable, bits, chunks, with_parts, zstd_part
from ingot.testing.values import random_bits
from tests.support.reference import delta_exact as reference

TYPES = tuple(row.name for row in DTYPES.values() if row.bits >= 8 and row.category != "c")
SHAPES = ((), (0,), (1,), (255,), (257,), (0, 3), (3, 0), (2, 3, 170), (2, 0, 3), (40, 96))
CODEC = ExactDelta()


def encode(base: Array, tuned: Array, chunk: int = 256, cuts: tuple[int, ...] = ()) -> Tensor:
    """Return the difference of two arrays as a tensor in memory, encoded in chunks that begin with chunks."""
    dtype = next(name for name in TYPES if numpy_dtype(name) == base.dtype)
    encoder = CODEC.encoder(base.shape, dtype, {"chunk": chunk})
    old, new = base.reshape(-1, 1), tuned.reshape(-1, 1)
    pieces = chunks(len(old), [cut // encoder.step * encoder.step for cut in cuts])
    found = [encoder.encode(old[piece], new[piece], piece.start) for piece in pieces]
    parts = {
        spec.role: memory_part(np.concatenate([one[spec.role] for one in found]), spec.dtype) for spec in encoder.parts
    }
    assert parts["planes"].length <= encoder.parts[1].at_most
    return Tensor("tensor", base.shape, dtype, encoder.codec, parts, dict(encoder.params), CODECS[encoder.codec])


def apply(tensor: Tensor, base: Array, cuts: tuple[int, ...] = (), *, in_place: bool = False) -> Array:
    """Apply in runs of elements that are cut anywhere."""
    rows = base.reshape(-1, 1).copy()
    out = rows if in_place else np.empty_like(rows)
    applier = CODEC.applier(tensor, tensor.dtype)
    for piece in chunks(len(rows), cuts):
        applier.apply(rows[piece], out[piece])
    applier.finish()
    return out.reshape(base.shape)


def pair(shape: tuple[int, ...], dtype: str, share: float, seed: int = 0) -> tuple[Array, Array]:
    """Any bits, and the same with a share of the elements replaced by others."""
    rng = np.random.default_rng([seed, len(shape), *shape])
    base = random_bits(rng, shape, dtype, zeros=0.3)
    return base, np.where(rng.random(shape) < share, random_bits(rng, shape, dtype, zeros=0.3), base).astype(base.dtype)


def moved(count: int, dtype: str, share: float, most: int = 3) -> tuple[Array, Array]:
    """Weights, and the same with a share of the elements moved by up to ``most`` units in the last place."""
    rng = np.random.default_rng(count)
    base = (rng.standard_normal(count) * 0.02).astype(numpy_dtype(dtype))
    words = base.view(f"u{base.dtype.itemsize}")
    steps = rng.integers(1, most + 1, count) * rng.choice((-1, 1), count) * (rng.random(count) < share)
    return base, (words + steps.astype(words.dtype)).view(base.dtype)


def tuned_by(count: int, dtype: str, scale: float) -> tuple[Array, Array]:
    """Weights, and the same after noise was added: nearly all differ."""
    rng = np.random.default_rng(count)
    weights = rng.standard_normal(count) * 0.02
    return weights.astype(numpy_dtype(dtype)), (weights + rng.standard_normal(count) * scale).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("share", [0.0, 0.03, 0.4, 1.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_comes_back_bit_for_bit(dtype: str, share: float) -> None:
    for shape in SHAPES:
        base, tuned = pair(shape, dtype, share)
        tensor = encode(base, tuned)
        CODEC.check(tensor)
        CODECS["delta_exact"].check(tensor)
        assert bits(apply(tensor, base)) == bits(tuned)
        assert bits(apply(tensor, base, in_place=True)) == bits(tuned)


@pytest.mark.parametrize("dtype", [name for name in TYPES if DTYPES[name].bits <= 16])
def test_every_bit_pattern_becomes_every_other(dtype: str) -> None:
    """NaN payloads, -0.0, infinities, subnormal numbers: all words of 8 bits against all, of 16 shuffled."""
    width = DTYPES[dtype].bits // 8
    words = np.arange(1 << 8 * width, dtype=f"u{width}")
    if width == 1:
        base, tuned = np.repeat(words, 256), np.tile(words, 256)
    else:
        base, tuned = words, np.random.default_rng(1).permutation(words)
    if dtype == "bool":
        base, tuned = base & 1, tuned & 1
    old, new = base.view(numpy_dtype(dtype)), tuned.view(numpy_dtype(dtype))
    assert bits(apply(encode(old, new, 1 << 14), old)) == bits(new)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64", "i8", "i16", "i32", "i64", "f8_e4m3fn"])
def test_extreme_differences_survive_in_every_mode(dtype: str) -> None:
    """From the lowest word to the highest and back, few and many times, among elements that barely change."""
    width = DTYPES[dtype].bits // 8
    for share in (0.01, 0.3):
        rng = np.random.default_rng(3)
        base = np.full(6000, 1 << 8 * width - 2, f"u{width}")
        tuned = base + rng.integers(0, 2, base.size).astype(base.dtype) * base.dtype.type(share > 0.1)
        ends = np.array([0, 1, (1 << 8 * width - 1) - 1, 1 << 8 * width - 1, (1 << 8 * width) - 1], base.dtype)
        some = rng.random(base.size) < share
        base, tuned = (np.where(some, rng.choice(ends, base.size), side) for side in (base, tuned))
        old, new = base.view(numpy_dtype(dtype)), tuned.view(numpy_dtype(dtype))
        assert bits(apply(encode(old, new, 8192), old)) == bits(new)


CUTS = ((1,), (255, 256, 257), (100, 300, 301, 2000), tuple(range(0, 2600, 7)), (256, 1024, 1030))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("mode", ["same", "sparse", "dense", "whole"])
def test_runs_may_be_cut_anywhere(mode: str, cuts: tuple[int, ...], in_place: bool) -> None:
    base, tuned = {
        "same": lambda: moved(2600, "bf16", 0),
        "sparse": lambda: moved(2600, "bf16", 0.02),
        "dense": lambda: tuned_by(2600, "bf16", 1e-4),
        "whole": lambda: noise(2600),
    }[mode]()
    tensor = encode(base, tuned, 1024, cuts)
    assert {reference.MODES[int(first)] for first in first_bytes(tensor)} == {mode}
    packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
    for stored in (tensor, packed):
        assert bits(apply(stored, base, cuts, in_place=in_place)) == bits(tuned)


def first_bytes(tensor: Tensor) -> Array:
    sizes, planes = tensor.parts["sizes"].array().astype(np.int64), tensor.parts["planes"].array()
    return np.asarray(planes[np.cumsum(sizes) - sizes])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_bytes_do_not_depend_on_chunks(dtype: str) -> None:
    base, tuned = tuned_by(3000, dtype, 1e-3)
    whole = encode(base, tuned)
    for cuts in ((256,), (300, 2000), tuple(range(0, 3000, 256))):
        cut = encode(base, tuned, cuts=cuts)
        assert [bytes(part.view()) for part in cut.parts.values()] == [
            bytes(part.view()) for part in whole.parts.values()
        ]


def test_rebuilding_gives_what_was_encoded() -> None:
    base, tuned = tuned_by(3000, "bf16", 1e-3)
    encoder = CODEC.encoder(base.shape, "bf16", {"chunk": 1024})
    out = np.empty_like(tuned)
    encoder.rebuild(encoder.encode(base, tuned), base, out)
    assert bits(out) == bits(tuned)
    assert (encoder.lossless, encoder.single_chunk, encoder.fit_passes, encoder.step) == (True, False, 0, 1024)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_whole_arrays_are_packed_and_unpacked_by_threads(workers: int) -> None:
    base, tuned = tuned_by((1 << 20) + (1 << 19) + 77, "bf16", 1e-4)
    before = bits(base)
    parts = pack(base, tuned, workers=workers)
    assert {role: bits(part) for role, part in parts.items()} == {
        role: bits(part) for role, part in pack(base, tuned, workers=2).items()
    }
    out = np.empty_like(base)
    unpack(parts, base, out, workers=workers)
    assert bits(out) == bits(tuned)
    assert bits(base) == before
    unpack(parts, base, base, workers=workers)
    assert bits(base) == bits(tuned)


def test_nothing_is_packed_and_unpacked() -> None:
    base = np.empty((0, 3), np.float32)
    parts = pack(base, base)
    assert [part.size for part in parts.values()] == [0, 0]
    unpack(parts, base, base)


def noise(count: int) -> tuple[Array, Array]:
    """Two arrays that have nothing to do with each other."""
    rng = np.random.default_rng(count)
    one, other = rng.integers(0, 1 << 16, (2, count), np.uint16).view(numpy_dtype("bf16"))
    return one, other


# Sizes.


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.015), ("f16", 0.015), ("f32", 0.0075)])
def test_few_changes_take_little(dtype: str, most: float) -> None:
    base, tuned = moved(1 << 18, dtype, 0.02)
    assert encode(base, tuned, CHUNK).nbytes <= most * base.nbytes


def test_many_small_changes_take_their_entropy() -> None:
    """Noise of a fiftieth of the weights: within two parts in a hundred of what coding by exponent can do."""
    base, tuned = tuned_by(1 << 18, "bf16", 4e-4)
    words = [values.view(np.uint16).astype(np.int64) for values in (base, tuned)]
    difference, exponent = words[1] - words[0], words[0] >> 7 & 255
    ideal = 0.0
    for one in np.unique(exponent):
        counts = np.unique(difference[exponent == one], return_counts=True)[1]
        ideal += float((counts * (np.log2(counts.sum()) - np.log2(counts))).sum())
    assert 8 * encode(base, tuned, CHUNK).nbytes <= 1.02 * ideal


def test_equal_tensors_take_a_byte_for_each_chunk() -> None:
    base, tuned = moved(1 << 18, "bf16", 0)
    assert encode(base, tuned, CHUNK).parts["planes"].length == 2


def test_unrelated_tensors_take_a_byte_more_for_each_chunk() -> None:
    base, tuned = noise(1 << 18)
    assert encode(base, tuned, CHUNK).parts["planes"].length == tuned.nbytes + 2


# Refusals.


def small(**changes: Any) -> Tensor:
    tensor = encode(*tuned_by(600, "bf16", 1e-3))
    params = {**tensor.params, **changes}
    return replace(tensor, params={key: value for key, value in params.items() if value is not None})


def refused(tensor: Tensor, rule: str) -> None:
    for check in (CODEC.check, CODECS["delta_exact"].check, lambda one: CODEC.applier(one, "bf16")):
        with pytest.raises(CodecError) as caught:
            check(tensor)
        assert caught.value.rule == rule


def test_without_its_base_nothing_is_decoded() -> None:
    tensor, codec = small(), CODECS["delta_exact"]
    for call in (
        tensor.numpy,
        lambda: codec.decode(tensor, "bf16"),
        lambda: codec.reader(tensor),
        lambda: codec.encoder((3,), "bf16", {}),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert caught.value.rule == "delta_exact.base"


def test_the_tables_name_it() -> None:
    codec = delta_codec("delta_exact")
    assert isinstance(codec, ExactDelta)
    assert (codec.exact, codec.elementwise, CODECS["delta_exact"].lossless) == (True, True, True)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "f4_e2m1fn", "f6_e2m3fn"])
def test_other_types_are_unsupported(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODEC.encoder((4,), dtype, {})
    assert caught.value.rule == "delta_exact.dtype"


@pytest.mark.parametrize(
    "options", [{"level": "max"}, {"chunk": 255}, {"chunk": 300}, {"chunk": 1 << 21}, {"chunk": 512.0}, {"chunk": True}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4,), "f32", options)
    assert caught.value.rule == "delta_exact.option"


@pytest.mark.parametrize(
    "changes",
    [
        {"codec_version": None},
        {"codec_version": 3},
        {"codec_version": True},
        {"chunk": 0},
        {"chunk": -256},
        {"chunk": 300},
        {"chunk": 1 << 40},
        {"chunk": "256"},
        {"chunk": True},
        {"chunk": None},
        {"dtype": "f16"},
        {"dtype": "complex64"},
        {"dtype": ["bf16"]},
        {"dtype": None},
    ],
)
def test_wrong_params_are_refused(changes: dict[str, Any]) -> None:
    refused(small(**changes), "delta_exact.params")


def test_parts_that_are_missing_or_of_other_types_are_refused() -> None:
    tensor = small()
    for role, dtype in (("sizes", "i32"), ("planes", "i8")):
        refused(with_parts(tensor, {role: replace(tensor.parts[role], dtype=dtype)}), "delta_exact.dtype")
        refused(with_parts(tensor, {role: replace(tensor.parts[role], type="f8_e5m2")}), "delta_exact.dtype")
        others = {key: part for key, part in tensor.parts.items() if key != role}
        refused(replace(tensor, parts=others), "delta_exact.part-missing")


def test_check_refuses_wrong_sizes_and_reads_nothing() -> None:
    tensor = small()
    sizes, planes = tensor.parts["sizes"], tensor.parts["planes"]
    for wrong in (sizes.length + 4, sizes.length + 1, sizes.length - 4):
        other = replace(sizes, length=wrong, source=Unreadable(wrong))
        refused(with_parts(tensor, {"sizes": other}), "delta_exact.size")
    for wrong in (2 * 600 + 4, 2, 0):
        other = replace(planes, length=wrong, source=Unreadable(wrong))
        refused(with_parts(tensor, {"planes": other}), "delta_exact.size")
    refused(replace(tensor, shape=(1 << 50,)), "delta_exact.size")


def with_bytes(tensor: Tensor, role: str, data: Array) -> Tensor:
    return with_parts(tensor, {role: memory_part(data, tensor.parts[role].dtype)})


def applying(tensor: Tensor, base: Array) -> set[str | None]:
    """The rules by which application in one run, in cut runs and in place refuses a tensor."""
    rules = set()
    for cuts, in_place in (((), False), ((100, 300), False), ((), True)):
        with pytest.raises(CodecError) as caught:
            apply(tensor, base, cuts, in_place=in_place)
        rules.add(caught.value.rule)
    return rules


def test_sizes_that_cannot_be_are_refused() -> None:
    tensor, base = small(), tuned_by(600, "bf16", 1e-3)[0]
    sizes = tensor.parts["sizes"].array().astype(np.int64)
    for change in ([1, 0, 0], [2**32 - 1, 0, 0], [600, -300, -300]):
        wrong = ((sizes + change) % 2**32).astype(np.uint32)
        assert applying(with_bytes(tensor, "sizes", wrong), base) == {"delta_exact.size"}
        with pytest.raises(CodecError) as caught:
            unpack({"sizes": wrong, "planes": tensor.parts["planes"].array()}, base, np.empty_like(base), chunk=256)
        assert caught.value.rule == "delta_exact.size"
    wrong = (sizes + np.array([1, -1, 0])).astype(np.uint32)
    rules = applying(with_bytes(tensor, "sizes", wrong), base)
    assert rules <= {f"delta_exact.{kind}" for kind in ("chunk", "table", "stream")}


def test_damaged_planes_raise_nothing_but_codec_errors() -> None:
    rng = np.random.default_rng(11)
    for base, tuned in (tuned_by(3000, "bf16", 1e-3), moved(3000, "f32", 0.05)):
        tensor = encode(base, tuned, 1024)
        planes = tensor.parts["planes"].array()
        rules = set()
        for _ in range(300):
            damaged = planes.copy()
            damaged[rng.integers(0, planes.size, 3)] = rng.integers(0, 256, 3)
            try:
                assert apply(with_bytes(tensor, "planes", damaged), base, (1000,)).shape == tensor.shape
            except CodecError as error:
                rules.add(error.rule)
        assert rules <= {f"delta_exact.{kind}" for kind in ("chunk", "table", "stream")}
        assert rules


def test_a_base_of_another_kind_is_refused() -> None:
    tensor = small()
    with pytest.raises(CodecError) as caught:
        CODEC.applier(tensor, "f16")
    assert caught.value.rule == "delta_exact.base"
    wanted = numpy_dtype("bf16")
    for base, out in (
        (np.zeros((600, 1), np.float16), np.zeros((600, 1), np.float16)),
        (np.zeros((600, 1), wanted), np.zeros((600, 1), np.float16)),
        (np.zeros((600, 1), wanted), np.zeros((601, 1), wanted)),
        (np.zeros((601, 1), wanted), np.zeros((601, 1), wanted)),
    ):
        with pytest.raises(CodecError) as caught:
            CODEC.applier(tensor, "bf16").apply(base, out)
        assert caught.value.rule == "delta_exact.base"


def test_arrays_of_different_shapes_are_refused() -> None:
    one, other = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)
    for call in (lambda: pack(one, other), lambda: unpack(pack(one, one), one, other)):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.rule == "delta_exact.shape"


def test_arrays_of_different_types_are_refused() -> None:
    with pytest.raises(IngotError) as caught:
        pack(np.zeros(3, np.float32), np.zeros(3, np.int32))
    assert caught.value.rule == "delta_exact.base"


@pytest.mark.parametrize(
    ("dtype", "tables"),
    [
        ("f64", "ff0c000c0088000200020088"),
        ("f32", "810200020088000c000c0088"),
        ("f16", "110200020088000c000c0088"),
        ("bf16", "810200020088000c000c0088"),
    ],
)
def test_bytes_that_were_written_once_mean_what_they_meant(dtype: str, tables: str) -> None:
    """Which bits of an element choose its context is stated in the code alone; these bytes lie in files.

    A third of the elements, from 1 on, moved by one unit in the last place, the others, from 4 on, by 9 or 10.
    """
    place = np.arange(256)
    base = ((place * 37 % 128 + 128) / 128.0 * np.where(place % 3 == 0, 1, 4)).astype(numpy_dtype(dtype))
    step = np.where(place % 3 == 0, 1, 9 + place % 2)
    words = base.view(f"u{base.dtype.itemsize}")
    tuned = (words + step.astype(words.dtype)).view(base.dtype)
    planes = np.frombuffer(bytes.fromhex(f"0301{tables}") + bytes(21) + b"\x96" * 42 + b"\x06", np.uint8)
    parts = {"sizes": memory_part(np.array([78], np.uint32), "u32"), "planes": memory_part(planes, "u8")}
    tensor = replace(encode(base, tuned), parts=parts)
    assert bits(apply(tensor, base)) == bits(tuned)
