"""The codec float_entropy: the suite, both levels, every float type, every kind of plane, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.lossless.float_entropy import EntropyCodec
from ingot.codecs.lossless.float_entropy_rows import decode_chunks, params_of
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, ResourceError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import (
    Case,
    CodecSuite,
    Unreadable,
    bits,
    encode_tensor,
    read_rows,
    with_parts,
    zstd_part,
)
from ingot.testing.values import random_bits

TYPES = tuple(row.name for row in DTYPES.values() if row.is_float and row.bits >= 8)
SMALL: dict[str, Any] = {"chunk": 256}
CODEC = EntropyCodec()


class TestEntropyCodec(CodecSuite):
    codec = CODEC
    cases = (
        *(Case((7, 150), dtype) for dtype in TYPES),
        *(Case((7, 150), dtype, {"level": "max"}) for dtype in TYPES),
        *(Case((40, 96), dtype, {**SMALL, "level": "max"}) for dtype in ("bf16", "f64")),
        *(
            Case(shape, "bf16", SMALL)
            for shape in ((), (0,), (1,), (255,), (257,), (0, 3), (3, 0), (2, 3, 170), (2, 0, 3))
        ),
        Case((64, 64), "f32"),
        Case((64, 64), "f32", {"level": "max"}),
    )

    def values(self, case: Case) -> Array:
        if "level" in case.options:
            return self.weights(case)
        return random_bits(np.random.default_rng(len(str(case))), case.shape, case.dtype, zeros=0.5)

    def subtest_check_refuses_wrong_sizes(self, case: Case) -> None:
        """How many bytes ``planes`` takes only the sizes tell, and ``check`` reads nothing: decoding tells then."""
        tensor = self.tensor(case)
        sizes, planes = tensor.parts["sizes"], tensor.parts["planes"]
        for wrong in (sizes.length + 4, sizes.length + 1, sizes.length - 4):
            if wrong >= 0:
                refused(with_parts(tensor, {"sizes": replace(sizes, length=wrong, source=Unreadable(wrong))}))
        for wrong in (CODEC.encoder(case.shape, case.dtype, case.options).parts[1].at_most + 1, 0):
            if wrong != planes.length:
                refused(with_parts(tensor, {"planes": replace(planes, length=wrong, source=Unreadable(wrong))}))
        data = bytes(planes.view())
        for other in (data + b"\0", data[:-1]):
            if len(other) == len(data):
                continue
            damaged = with_parts(tensor, {"planes": memory_part(np.frombuffer(other, np.uint8), "u8")})
            for read in (damaged.numpy, lambda damaged=damaged: read_rows(CODEC, damaged, tensor.dtype)):
                with pytest.raises(CodecError) as caught:
                    read()
                assert caught.value.rule == "float_entropy.size"


def refused(tensor: Tensor, rule: str = "float_entropy.size") -> None:
    with pytest.raises(CodecError) as caught:
        CODEC.check(tensor)
    assert caught.value.rule == rule


def test_params_and_parts_are_these() -> None:
    encoder = CODEC.encoder((3, 1 << 17), "bf16", {})
    assert dict(encoder.params) == {"codec_version": 1, "level": "fast", "chunk": 1 << 17, "dtype": "bf16"}
    assert [(spec.role, spec.dtype, spec.length) for spec in encoder.parts] == [
        ("sizes", "u32", 12),
        ("planes", "u8", None),
    ]
    assert encoder.parts[1].limit == 2 * (3 << 17) + 2 * 3
    assert (encoder.step, encoder.single_chunk, encoder.lossless) == (1 << 17, False, True)


def test_the_version_says_where_rans_may_be() -> None:
    for shape, options, version in (
        ((1 << 16,), {"level": "max"}, 2),
        ((1 << 16,), {"level": "fast"}, 1),
        (((1 << 16) - 1,), {"level": "max"}, 1),
        ((1 << 18,), {"level": "max", "chunk": 1 << 15}, 1),
    ):
        assert CODEC.encoder(shape, "bf16", options).params["codec_version"] == version
    tensor = encode_tensor(CODEC, weights((1 << 16,), "bf16"), {"level": "max"}, dtype="bf16")
    assert tensor.params["codec_version"] == 2
    assert bits(tensor.numpy()) == bits(weights((1 << 16,), "bf16"))


@pytest.mark.parametrize("level", ["fast", "max"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_bit_pattern_survives(dtype: str, level: str) -> None:
    """NaN payloads, -0.0, subnormal numbers, infinities: all patterns of 8 and 16 bits, many of wider types."""
    width = DTYPES[dtype].bits // 8
    if width <= 2:
        source = np.arange(1 << 8 * width, dtype=f"u{width}").view(numpy_dtype(dtype))
    else:
        source = random_bits(np.random.default_rng(5), (70000,), dtype)
    tensor = encode_tensor(CODEC, source, {"level": level, "chunk": 1 << 14}, dtype=dtype)
    assert bits(tensor.numpy()) == bits(source)
    assert bits(read_rows(CODEC, tensor, dtype)) == bits(source)


@pytest.mark.parametrize("cuts", [(1,), (255, 256, 257), (100, 300, 301, 2000), tuple(range(0, 2600, 7))])
@pytest.mark.parametrize("compressed", [False, True])
def test_rows_in_any_runs(cuts: tuple[int, ...], compressed: bool) -> None:
    source = weights((2600, 1), "bf16")
    tensor = encode_tensor(CODEC, source, SMALL, dtype="bf16")
    if compressed:
        tensor = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
    assert bits(read_rows(CODEC, tensor, "bf16", cuts)) == bits(source)
    assert bits(read_rows(CODEC, tensor, "f64", cuts)) == bits(source.astype(np.float64))


def test_many_threads_decode_what_one_does() -> None:
    source = weights((1 << 21) + 77, "bf16")
    tensor = encode_tensor(CODEC, source, {}, dtype="bf16")
    params, arrays = params_of(tensor), {role: part.array() for role, part in tensor.parts.items()}
    out = np.empty(source.shape, source.dtype)
    for workers in (0, 1, 3):
        out.view(np.uint16)[...] = 0
        decode_chunks(params, arrays["planes"], arrays["sizes"], out, location="t", workers=workers)
        assert bits(out) == bits(source)


def weights(shape: int | tuple[int, ...], dtype: str) -> Array:
    return (np.random.default_rng(2).standard_normal(shape) * 0.02).astype(numpy_dtype(dtype))


def test_bfloat16_in_float32_costs_what_bfloat16_does() -> None:
    narrow = weights((1 << 19,), "bf16")
    sizes = [
        encode_tensor(CODEC, source, {}, dtype=dtype).nbytes
        for source, dtype in ((narrow, "bf16"), (narrow.astype(np.float32), "f32"))
    ]
    assert sizes[1] <= sizes[0] * 1.01


@pytest.mark.parametrize("dtype", ["i8", "u64", "bool", "complex64", "f4_e2m1fn", "f6_e2m3fn"])
def test_other_types_are_unsupported(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODEC.encoder((4,), dtype, {})
    assert caught.value.rule == "float_entropy.dtype"


@pytest.mark.parametrize(
    "options",
    [
        {"level": "best"},
        {"level": 3},
        {"chunk": 255},
        {"chunk": 300},
        {"chunk": 1 << 21},
        {"chunk": 512.0},
        {"chunk": True},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4,), "f32", options)
    assert caught.value.rule == "float_entropy.option"


def small(**changes: Any) -> Tensor:
    tensor = encode_tensor(CODEC, weights((600,), "bf16"), SMALL, dtype="bf16")
    params = {**tensor.params, **changes}
    return replace(tensor, params={key: value for key, value in params.items() if value is not None})


@pytest.mark.parametrize(
    "changes",
    [
        {"codec_version": None},
        {"codec_version": 3},
        {"codec_version": True},
        {"level": "best"},
        {"level": ["fast"]},
        {"level": None},
        {"chunk": 0},
        {"chunk": -256},
        {"chunk": 300},
        {"chunk": 1 << 40},
        {"chunk": "256"},
        {"chunk": True},
        {"dtype": "f16"},
        {"dtype": "i16"},
        {"dtype": ["bf16"]},
        {"dtype": None},
    ],
)
def test_wrong_params_are_refused(changes: dict[str, Any]) -> None:
    refused(small(**changes), "float_entropy.params")


def test_parts_of_other_types_are_refused() -> None:
    tensor = small()
    for role, dtype in (("sizes", "i32"), ("planes", "i8")):
        refused(with_parts(tensor, {role: replace(tensor.parts[role], dtype=dtype)}), "float_entropy.dtype")
    typed = replace(tensor.parts["planes"], type="f8_e5m2")
    refused(with_parts(tensor, {"planes": typed}), "float_entropy.dtype")


def decoding(tensor: Tensor) -> set[str | None]:
    """The rules by which both ways of decoding refuse a tensor."""
    rules = set()
    for read in (tensor.numpy, lambda: tensor.numpy("f32"), lambda: read_rows(CODEC, tensor, tensor.dtype, (100,))):
        with pytest.raises(CodecError) as caught:
            read()
        rules.add(caught.value.rule)
    return rules


def with_bytes(tensor: Tensor, role: str, data: Array) -> Tensor:
    return with_parts(tensor, {role: memory_part(data, tensor.parts[role].dtype)})


def test_sizes_that_cannot_be_are_refused() -> None:
    tensor = small()
    sizes = tensor.parts["sizes"].array().astype(np.int64)
    for change in ([1, -1, 0], [600, -300, -300], [1, 0, 0], [2**32 - 1, 0, 0]):
        wrong = ((sizes + change) % 2**32).astype(np.uint32)
        expected = "float_entropy.size" if sum(change) or max(change) > 1 else None
        rules = decoding(with_bytes(tensor, "sizes", wrong))
        assert rules <= {expected} if expected else rules <= {f"float_entropy.{kind}" for kind in ("chunk", "stream")}


def test_the_message_names_the_chunk() -> None:
    tensor = small()
    planes = tensor.parts["planes"].array().copy()
    second = int(tensor.parts["sizes"].array()[0])
    planes[second] = 9
    damaged = with_bytes(tensor, "planes", planes)
    assert decoding(damaged) == {"float_entropy.chunk"}
    with pytest.raises(CodecError, match="in chunk 1"):
        damaged.numpy()


def test_damaged_planes_raise_nothing_but_codec_errors() -> None:
    rng = np.random.default_rng(11)
    tensor = encode_tensor(CODEC, weights((3000,), "bf16"), {"level": "max", "chunk": 1024}, dtype="bf16")
    planes = tensor.parts["planes"].array()
    rules = set()
    for _ in range(400):
        damaged = planes.copy()
        damaged[rng.integers(0, planes.size, 3)] = rng.integers(0, 256, 3)
        try:
            values = with_bytes(tensor, "planes", damaged).numpy()
            assert values.shape == tensor.shape
        except CodecError as error:
            rules.add(error.rule)
    assert rules <= {f"float_entropy.{kind}" for kind in ("chunk", "table", "stream")}
    assert rules


def test_a_few_bytes_do_not_claim_any_memory() -> None:
    """Sizes are checked before the result is allocated: the claim must at least be paid for by a size per chunk."""
    tensor = replace(small(), shape=(1 << 50,))
    refused(tensor)
    with pytest.raises(ResourceError) as caught:
        tensor.numpy()
    assert caught.value.rule == "decoded.limit"
