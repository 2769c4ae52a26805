"""The dense codec: the suite, its zero-copy views, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.dense.codec import DenseCodec
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor, read_rows, zstd_part
from ingot.testing.values import random_bits
from tests.support.strategies import WHOLE_BYTE_DTYPES

SHAPES = [(), (0,), (1,), (7,), (0, 3), (3, 0), (5, 4), (2, 3, 4), (2, 0, 3), (1, 1, 1, 2)]
CASTS = [("f32", "bf16"), ("f32", "f16"), ("f64", "bf16"), ("bf16", "f32"), ("f16", "f8_e4m3fn"), ("f8_e5m2", "f16")]


class TestDenseCodec(CodecSuite):
    codec = DenseCodec()
    cases = (
        *(Case((3, 5), dtype) for dtype in WHOLE_BYTE_DTYPES),
        *(Case(shape, dtype) for shape in SHAPES for dtype in ("bf16", "i64")),
        *(Case((6, 11), source, {"dtype": target}) for source, target in CASTS),
        Case((), "f64", {"dtype": "f16"}),
        Case((0, 4), "i32", {"dtype": "f32"}),
    )
    min_snr_db = 20.0  # three mantissa bits of f8_e4m3fn
    repacks = False


def dense(data: bytes, shape: tuple[int, ...], storage: str, type: str | None = None) -> Tensor:
    part = Part(storage, len(data), MemorySource(data), type=type)
    return Tensor("t", shape, type or storage, "dense", {"data": part}, decoder=CODECS["dense"])


def rule_of(error: pytest.ExceptionInfo[IngotError]) -> str | None:
    return error.value.rule


@pytest.mark.parametrize("dtype", WHOLE_BYTE_DTYPES)
def test_own_dtype_is_a_read_only_view(dtype: str) -> None:
    source = random_bits(np.random.default_rng(1), (4, 3), dtype)
    row = DTYPES[dtype]
    part = memory_part(source, row.storage, None if row.is_storage else row.name)
    array = Tensor("t", (4, 3), dtype, "dense", {"data": part}, decoder=CODECS["dense"]).numpy()
    assert np.shares_memory(array.view(np.uint8), source.view(np.uint8))
    assert not array.flags.writeable
    assert source.flags.writeable
    assert array.dtype == numpy_dtype(dtype)
    assert bits(array) == bits(source)


def test_little_endian_bytes() -> None:
    assert dense(b"\x01\x02\x03\x04", (1,), "u32").numpy().tolist() == [0x04030201]
    assert dense(b"\x80\x3f", (), "bf16").numpy() == 1.0
    assert dense(b"\0\0\x80\x3f\0\0\0\x40", (), "f32", "complex64").numpy() == 1 + 2j
    assert dense(b"\x7e\x38", (2,), "u8", "f8_e4m3fn").numpy("f32").tolist() == [448.0, 1.0]
    assert dense(b"\x7f\xff", (2,), "u8", "f8_e8m0fnu").numpy("f32").tolist()[0] == 1.0


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_bool_bytes_other_than_0_and_1_are_refused(encoding: str) -> None:
    tensor = dense(b"\x00\x01\x02", (3,), "bool")
    if encoding == "zstd":
        tensor = replace(tensor, parts={"data": zstd_part(tensor.parts["data"])})
    with pytest.raises(CodecError) as one:
        tensor.numpy()
    with pytest.raises(CodecError) as two:
        read_rows(CODECS["dense"], tensor, "bool")
    with pytest.raises(CodecError) as three:
        tensor.numpy("f32")
    assert {rule_of(one), rule_of(two), rule_of(three)} == {"dense.bool"}


def test_unknown_type_falls_back_to_storage_elements() -> None:
    tensor = dense(b"\x01\x00\x02\x00", (2,), "u16", "posit16")
    CODECS["dense"].check(tensor)
    assert tensor.numpy().tolist() == [1, 2]
    assert tensor.numpy().dtype == np.uint16


def test_unknown_type_is_refused_as_numbers() -> None:
    tensor = dense(b"\x01\x00\x02\x00", (2,), "u16", "posit16")
    for attempt in (lambda: tensor.numpy("f32"), lambda: CODECS["dense"].reader(tensor)):
        with pytest.raises(UnsupportedError) as caught:
            attempt()
        assert rule_of(caught) == "dense.unknown-dtype"


def test_unknown_type_of_another_size_is_refused() -> None:
    tensor = dense(b"\x01\x00\x02", (2,), "u8", "int12")
    CODECS["dense"].check(tensor)
    with pytest.raises(UnsupportedError) as caught:
        tensor.numpy()
    assert rule_of(caught) == "dense.unknown-dtype"


@pytest.mark.parametrize("dtype", ["f4_e2m1fn", "f6_e2m3fn", "f6_e3m2fn"])
def test_packed_floats_are_checked_but_not_decoded(dtype: str) -> None:
    size = DTYPES[dtype].nbytes(8)
    tensor = dense(bytes(size), (8,), "u8", dtype)
    CODECS["dense"].check(tensor)
    for attempt in (tensor.numpy, lambda: tensor.numpy("f32"), lambda: CODECS["dense"].encoder((8,), dtype, {})):
        with pytest.raises(UnsupportedError):
            attempt()
    with pytest.raises(CodecError):
        CODECS["dense"].check(dense(bytes(size + 1), (8,), "u8", dtype))


def test_storage_must_be_that_of_the_type() -> None:
    with pytest.raises(CodecError) as caught:
        CODECS["dense"].check(dense(bytes(4), (4,), "i8", "f8_e4m3fn"))
    assert rule_of(caught) == "dense.dtype"


def test_sizes_that_would_overflow_are_refused() -> None:
    with pytest.raises(CodecError) as caught:
        CODECS["dense"].check(dense(bytes(8), (2**62, 2**62), "u8"))
    assert rule_of(caught) == "dense.size"


@pytest.mark.parametrize("target", ["i32", "bool", "complex64", "f8_e8m0fnu", "f4_e2m1fn"])
def test_casts_that_surprise_are_refused(target: str) -> None:
    tensor = dense(bytes(8), (2,), "f32")
    with pytest.raises(UnsupportedError) as decoding:
        tensor.numpy(target)
    with pytest.raises(UnsupportedError) as encoding:
        CODECS["dense"].encoder((2,), "f32", {"dtype": target})
    assert rule_of(decoding) == rule_of(encoding) == "dense.cast"


@pytest.mark.parametrize("options", [{"bits": 4}, {"dtype": "f33"}, {"dtype": 4}])
def test_wrong_options(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        CODECS["dense"].encoder((2,), "f32", options)
    assert rule_of(caught) == "dense.option"


def test_overflow_is_an_error_when_encoding_and_decoding() -> None:
    values = np.array([[1.0, 1e30]], np.float32)
    with pytest.raises(CodecError) as encoding:
        CODECS["dense"].encoder((1, 2), "f32", {"dtype": "f16"}).encode(values)
    with pytest.raises(CodecError) as decoding:
        encode_tensor(CODECS["dense"], values, dtype="f32").numpy("f16")
    assert rule_of(encoding) == rule_of(decoding) == "dense.overflow"


@pytest.mark.parametrize(
    ("source", "target", "lossless"),
    [
        ("bf16", "f32", True),
        ("f32", "bf16", False),
        ("f16", "bf16", False),
        ("bf16", "f16", False),
        ("f8_e5m2", "f16", True),
        ("f8_e4m3fn", "bf16", True),
        ("f8_e8m0fnu", "bf16", True),
        ("f8_e8m0fnu", "f16", False),
        ("f32", "f32", True),
        ("i8", "bf16", True),
        ("i16", "bf16", False),
        ("u16", "f16", False),
        ("i32", "f32", False),
        ("i32", "f64", True),
        ("i64", "f64", False),
        ("bool", "f8_e4m3fn", True),
        ("u8", "i16", True),
        ("complex64", "complex128", True),
        ("complex128", "complex64", False),
    ],
)
def test_encoders_tell_whether_values_survive(source: str, target: str, lossless: bool) -> None:
    encoder = CODECS["dense"].encoder((2, 2), source, {"dtype": target})
    assert encoder.lossless is lossless
    only = encoder.parts[0]
    assert (only.type or only.dtype) == target


def test_reader_refuses_more_rows_than_there_are() -> None:
    reader = CODECS["dense"].reader(dense(bytes(8), (2, 1), "f32"))
    reader.read_into(np.empty((2, 1), np.float32))
    with pytest.raises(IngotError):
        reader.read_into(np.empty((1, 1), np.float32))


def test_reader_fills_strided_rows() -> None:
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    out = np.zeros((2, 4), np.float32)
    CODECS["dense"].reader(dense(values.tobytes(), (2, 2), "f32")).read_into(out[:, ::2])
    np.testing.assert_array_equal(out, [[0, 0, 1, 0], [2, 0, 3, 0]])


def test_every_codec_of_the_table_is_one_object() -> None:
    for name in ("dense", "sparse_csr", "sparse_coo"):
        assert CODECS[name] is CODECS.get_or_refuse(name)
        assert CODECS[name].id == name
    with pytest.raises(UsageError):
        CODECS.get_or_refuse("zip")
