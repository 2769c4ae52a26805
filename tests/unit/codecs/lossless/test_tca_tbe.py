"""The triple-bitmap codec: the suite, the published layout, refusals of parts that lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.codecs.lossless.tca_tbe import TcaCodec
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor, read_rows
from ingot.testing.values import random_bits
from tests.support.reference import tca_tbe as reference

CODEC = TcaCodec()
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = (
    (),
    (0,),
    (1,),
    (7,),
    (130,),
    (0, 3),
    (3, 0),
    (5, 4),
    (64, 64),
    (2, 3, 40),
    (2, 0, 3),
    (130, 70),
    (3, 50, 129),
)


class TestTcaCodec(CodecSuite):
    codec = TcaCodec()
    cases = (
        *(Case(shape, "bf16") for shape in SHAPES),
        *(Case((70, 65), "bf16", {"start": start}) for start in (-1, 0, 60, 115, 247, 248)),
    )


def tca(array: Array, **options: Any) -> Tensor:
    return encode_tensor(CODEC, array, options, dtype="bf16")


def weights(*shape: int, sigma: float = 0.02) -> Array:
    return np.random.default_rng(len(shape)).normal(0, sigma, shape).astype(BF16)


def every_pattern() -> Array:
    return np.random.default_rng(1).permutation(np.arange(65536, dtype=np.uint16)).view(BF16).reshape(256, 256)


def refused(error: type[IngotError], call: Callable[[], object]) -> str | None:
    with pytest.raises(error) as caught:
        call()
    return caught.value.rule


@pytest.mark.parametrize("start", [None, *range(-1, 249, 31), 248])
def test_every_bit_pattern_survives_any_window(start: int | None) -> None:
    source = every_pattern()
    assert bits(tca(source, **({} if start is None else {"start": start})).numpy()) == bits(source)


def test_parts_are_those_of_the_published_layout() -> None:
    """A whole matrix by the reference, and one tile by hand: codes.md's orders spelled out once more."""
    source = weights(128, 192)
    tensor = tca(source)
    wanted = reference.encode(source.view(np.uint16), tensor.params["start"])
    assert list(tensor.parts) == list(wanted)
    for role, array in wanted.items():
        assert bytes(tensor.parts[role].view()) == array.tobytes(), role
    bits_of = np.zeros((64, 64), np.uint16)  # +0: fallback everywhere, but for
    bits_of[0, 1] = 116 << 7 | 0x8000 | 5  # small tile 0, position 1, code 1
    bits_of[9, 2] = 118 << 7  # below it: small tile 1, position 10, code 3
    bits_of[0, 8] = 122 << 7  # right of it: small tile 2, position 0, code 7
    bits_of[0, 16] = 119 << 7 | 9  # next group: small tile 4, position 0, code 4
    bits_of[16, 0] = 117 << 7 | 1  # next median tile: small tile 16, position 0, code 2
    tile = tca(bits_of.view(BF16), start=115)
    planes = [tile.parts[f"bitmap{plane}"].array() for plane in (1, 2, 3)]
    codes = {(0, 1): 1, (1, 10): 3, (2, 0): 7, (4, 0): 4, (16, 0): 2}
    for plane in range(3):
        expected = np.zeros(64, np.uint64)
        for (word, position), code in codes.items():
            expected[word] |= np.uint64((code >> plane & 1) << position)
        assert np.array_equal(planes[plane], expected), plane
    assert tile.parts["counts"].array().tolist() == [16, 4096]
    assert tile.parts["high"].array().tolist() == [0x85, 0, 0, 9, 1] + [0] * 11
    assert tile.parts["fallback"].array().tolist() == [0] * 4096


def test_the_window_has_the_largest_mass_and_is_the_lowest_of_equals() -> None:
    def start_of(*exponents: int) -> object:
        return tca((np.array(exponents, np.uint16) << 7).view(BF16)).params["start"]

    assert tca(weights(256, 256)).params["start"] == 115  # exponents 116 to 122, as published for sigma 0.02
    assert start_of() == start_of(0) == start_of(6) == -1
    assert start_of(255) == 248
    assert start_of(100, 106) == start_of(100, 106, 93) == 99
    assert start_of(100, 93) == 86
    assert start_of(100, 150, 150) == 143


def test_bits_per_weight() -> None:
    tensor = tca(weights(2048, 512))
    assert tensor.nbytes * 8 / tensor.size <= 11.3


def test_padding_costs_a_byte_and_is_ignored() -> None:
    """What lies past the matrix has code 1 and the high byte 0; readers do not look at it."""
    tensor = tca(weights(5, 3))
    assert tensor.parts["high"].nbytes + tensor.parts["fallback"].nbytes // 2 <= 4096 + 24
    bitmap = tensor.parts["bitmap1"].array()
    assert bitmap[63] == 2**64 - 1
    high = tensor.parts["high"].array().copy()
    high[-64:] = 0x55
    changed = replace(tensor, parts={**tensor.parts, "high": memory_part(high, "u8")})
    assert bits(changed.numpy()) == bits(tensor.numpy())


def test_params_have_no_start_before_the_scan() -> None:
    encoder = CODEC.encoder((4, 4), "bf16", {})
    assert dict(encoder.params) == {"codec_version": 1, "dtype": "bf16"}
    assert encoder.fit_passes == 1
    encoder.fit_pass(weights(2, 4))
    assert "start" not in encoder.params
    encoder.fit_pass(weights(2, 4))
    assert encoder.params["start"] >= -1
    assert CODEC.encoder((4, 4), "bf16", {"start": 3}).fit_passes == 0
    assert CODEC.encoder((0, 4), "bf16", {}).params["start"] == -1
    with pytest.raises(ValueError, match="fit pass"):
        CODEC.encoder((4, 4), "bf16", {}).encode(weights(4, 4))


def test_chunks_begin_at_whole_bands() -> None:
    encoder = CODEC.encoder((130, 4), "bf16", {"start": 115})
    for rows, start in ((10, 0), (64, 10), (64, 128)):
        with pytest.raises(ValueError, match="bands"):
            encoder.encode(weights(rows, 4), start)
    with pytest.raises(ValueError, match="columns"):
        encoder.encode(weights(64, 5))


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64", "i16", "u8", "bool"])
def test_only_bf16_is_encoded(dtype: str) -> None:
    assert refused(UnsupportedError, lambda: CODEC.encoder((2, 8), dtype, {})) == "tca_tbe.dtype"


@pytest.mark.parametrize("start", [-2, 249, 3.0, "3", True])
def test_wrong_options_are_refused(start: object) -> None:
    assert refused(UsageError, lambda: CODEC.encoder((2, 8), "bf16", {"start": start})) == "tca_tbe.option"


def test_decoding_to_other_types_follows_the_rules_of_casts() -> None:
    source = random_bits(np.random.default_rng(5), (70, 65), "bf16")
    with np.errstate(invalid="ignore"):
        wide = tca(source).numpy("f64")
        np.testing.assert_array_equal(wide, source.astype(np.float64))
    large = np.full((3, 3), 1e38).astype(BF16)
    assert refused(CodecError, lambda: tca(large).numpy("f16")) == "dense.overflow"
    assert refused(CodecError, lambda: read_rows(CODEC, tca(large), "f16")) == "dense.overflow"
    assert refused(UnsupportedError, lambda: tca(large).numpy("i32")) == "dense.cast"


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_threads_and_sources_change_nothing(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    source = random_bits(np.random.default_rng(2), (2100, 2050), "bf16", zeros=0.5)
    tensor = tca(source)
    wanted = bits(source.astype(numpy_dtype(dtype)) if dtype == "bf16" else tensor.numpy(dtype))
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert bits(tensor.numpy(dtype)) == wanted
        unmapped = {role: replace(part, source=Unmapped(part.stored())) for role, part in tensor.parts.items()}
        assert bits(replace(tensor, parts=unmapped).numpy(dtype)) == wanted
    assert bits(read_rows(CODEC, tensor, dtype, (1, 63, 64, 65, 1000, 2099))) == wanted


class Unmapped(MemorySource):
    mapped = False


def test_any_number_of_empty_rows_takes_no_time() -> None:
    many = replace(tca(weights(3, 0)), shape=(2**60, 0))
    assert many.numpy().shape == (2**60, 0)
    assert read_rows(CODEC, many, "f32").shape == (2**60, 0)


WRONG_PARAMS: list[dict[str, Any]] = [
    {"codec_version": 2},
    {"codec_version": True},
    {"codec_version": None},
    {"start": -2},
    {"start": 249},
    {"start": 3.0},
    {"start": False},
    {"start": None},
    {"dtype": "f16"},
    {"dtype": None},
]


@pytest.mark.parametrize("change", WRONG_PARAMS, ids=str)
def test_wrong_parameters_are_refused(change: dict[str, Any]) -> None:
    tensor = tca(weights(3, 10))
    wrong = replace(tensor, params={**tensor.params, **change})
    for call in (lambda: CODEC.check(wrong), lambda: CODEC.reader(wrong), wrong.numpy):
        assert refused(CodecError, call) == "tca_tbe.params"


def test_wrong_parts_are_refused() -> None:
    tensor = tca(weights(70, 10))

    def rule(**changed: Array | None) -> str | None:
        parts = dict(tensor.parts)
        for role, array in changed.items():
            parts.pop(role, None)
            if array is not None:
                parts[role] = memory_part(array, {"u": "u", "i": "i"}[array.dtype.kind] + str(8 * array.itemsize))
        return refused(CodecError, lambda: CODEC.check(replace(tensor, parts=parts)))

    arrays = {role: part.array() for role, part in tensor.parts.items()}
    assert rule(high=None) == "tca_tbe.parts"
    assert rule(extra=arrays["high"]) == "tca_tbe.parts"
    assert rule(counts=arrays["counts"].view(np.int16)) == "tca_tbe.dtype"
    assert rule(bitmap2=arrays["bitmap2"][:-1]) == "tca_tbe.size"
    assert rule(counts=arrays["counts"][:-1]) == "tca_tbe.size"
    assert rule(high=arrays["high"][:-48]) == "tca_tbe.size"
    assert rule(high=np.zeros(3 * 4096, np.uint8)) == "tca_tbe.size"
    assert rule(fallback=arrays["fallback"][:-4]) == "tca_tbe.size"
    for shape in ((65, 65), (64, 64), (2**62, 2**62), (0, 3), (2**62, 0)):
        assert refused(CodecError, partial(CODEC.check, replace(tensor, shape=shape))) == "tca_tbe.size"


def lying(tensor: Tensor, **arrays: Array) -> list[str | None]:
    """The rules by which both ways of decoding refuse a tensor with some parts replaced."""
    parts = {**tensor.parts, **{role: memory_part(array, tensor.parts[role].dtype) for role, array in arrays.items()}}
    wrong = replace(tensor, parts=parts)
    CODEC.check(wrong)  # sizes alone show nothing
    unmapped = {role: replace(part, source=Unmapped(part.stored())) for role, part in parts.items()}
    ways = (wrong.numpy, replace(tensor, parts=unmapped).numpy, lambda: read_rows(CODEC, wrong, "bf16", (1, 70)))
    return [refused(CodecError, way) for way in ways]


def test_counts_that_lie_are_refused() -> None:
    tensor = tca(random_bits(np.random.default_rng(4), (130, 70), "bf16", zeros=0.7))
    counts = tensor.parts["counts"].array()
    for index in range(len(counts)):
        true = int(counts[index])
        for value in {0, true + 16, max(true - 16, 0), 4096, 4112, 65535} - {true}:
            lie = counts.copy()
            lie[index] = value
            assert lying(tensor, counts=lie) == ["tca_tbe.counts"] * 3, (index, value)
    moved = counts.copy()  # the sums hold, the tiles do not
    moved[0], moved[2] = moved[0] - 16, moved[2] + 16
    assert lying(tensor, counts=moved) == ["tca_tbe.counts"] * 3
    bitmap = tensor.parts["bitmap1"].array().copy()
    bitmap[70] ^= np.uint64(0xFFFF_FFFF_FFFF_FFFF)
    assert lying(tensor, bitmap1=bitmap) == ["tca_tbe.counts"] * 3
    longer = np.append(tensor.parts["high"].array(), np.zeros(16, np.uint8))
    assert lying(tensor, high=longer) == ["tca_tbe.counts"] * 3
