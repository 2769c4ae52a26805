"""Codec ``ggml_blocks``: formulas written again here one element at a time, readers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from struct import unpack_from

import numpy as np
import pytest

from ingot.codecs.blocks.codec import BlocksCodec
from ingot.codecs.blocks.grids import grid
from ingot.core.numeric.dtypes import cast
from ingot.errors import IngotError
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor

F = np.float32
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def f16(b: bytes, at: int) -> np.float32:
    return F(unpack_from("<e", b, at)[0])


def nibble(b: bytes, at: int, i: int, run: int = 16) -> int:
    """Low nibbles of a run of bytes first, then the high ones."""
    byte = b[at + i // (2 * run) * run + i % run]
    return byte >> 4 if i % (2 * run) >= run else byte & 15


def two(b: bytes, at: int, i: int) -> int:
    return b[at + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3


def six(b: bytes, k: int) -> tuple[int, int]:
    if k < 4:
        return b[4 + k] & 63, b[8 + k] & 63
    return (b[8 + k] & 15) | (b[k] >> 6) << 4, (b[8 + k] >> 4) | (b[4 + k] >> 6) << 4


def q3_scale(b: bytes, k: int) -> int:
    low = b[96 + k % 8] >> 4 * (k // 8) & 15
    return (low | (b[104 + k % 4] >> 2 * (k // 4) & 3) << 4) - 32


def iq4_scale(b: bytes, k: int) -> int:
    low = b[4 + k // 2] >> 4 * (k % 2) & 15
    return (low | (unpack_from("<H", b, 2)[0] >> 2 * k & 3) << 4) - 32


def e4m3(code: int) -> np.float32:
    if code in (0, 0x7F):
        return F(0)
    exponent, mantissa = code >> 3 & 15, code & 7
    return F(mantissa * 2.0**-10 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8))


def ternary(b: bytes, i: int) -> int:
    byte, digit = (b[i % 32], i // 32) if i < 160 else (b[32 + i % 16], (i - 160) // 16)
    if i >= 240:
        byte, digit = b[48 + i % 4], (i - 240) // 4
    return (byte * 3**digit % 256) * 3 >> 8


def bit(b: bytes, at: int, i: int) -> int:
    return b[at + i // 8] >> i % 8 & 1


def u16(b: bytes, at: int, i: int) -> int:
    return int(unpack_from("<H", b, at + 2 * i)[0])


def u32(b: bytes, at: int, i: int) -> int:
    return int(unpack_from("<I", b, at + 4 * i)[0])


def sign(seven: int, i: int) -> np.float32:
    """The sign of element ``i`` of eight: that of the last makes the number of minuses even."""
    return F(-1) if (seven >> i if i < 7 else seven.bit_count()) & 1 else F(1)


def small(b: bytes, at: int, k: int) -> int:
    return b[at + k // 2] >> 4 * (k % 2) & 15


def entry(name: str, index: int, i: int) -> np.float32:
    return F(grid(name)[index, i])


def iq1_s(b: bytes, i: int) -> np.float32:
    word = u16(b, 34, i // 32)
    index = b[2 + i // 8] | (word >> 3 * (i // 8 % 4) & 7) << 8
    return f16(b, 0) * F(2 * (word >> 12 & 7) + 1) * (entry("iq1", index, i % 8) + F(-0.125 if word >> 15 else 0.125))


def iq1_m(b: bytes, i: int) -> np.float32:
    d = sum((u16(b, 48, k) >> 12) << 4 * k for k in range(4))
    scale, more = u16(b, 48, i // 64) >> 3 * (i // 16 % 4) & 7, small(b, 32, i // 8)
    value = entry("iq1", b[i // 8] | (more & 7) << 8, i % 8) + F(-0.125 if more & 8 else 0.125)
    return F(np.uint16(d).view(np.float16)) * F(2 * scale + 1) * value


def iq2_xxs(b: bytes, i: int) -> np.float32:
    word = u32(b, 6 + i // 32 * 8, 0)
    value = entry("iq2_xxs", b[2 + i // 32 * 8 + i // 8 % 4], i % 8) * sign(word >> 7 * (i // 8 % 4) & 127, i % 8)
    return f16(b, 0) * F((word >> 28) + 0.5) * F(0.25) * value


def iq2_xs(b: bytes, i: int) -> np.float32:
    word = u16(b, 2, i // 8)
    value = entry("iq2_xs", word & 511, i % 8) * sign(word >> 9, i % 8)
    return f16(b, 0) * F(small(b, 66, i // 16) + 0.5) * F(0.25) * value


def iq2_s(b: bytes, i: int) -> np.float32:
    index = b[2 + i // 8] | (b[66 + i // 32] >> 2 * (i // 8 % 4) & 3) << 8
    value = entry("iq2_s", index, i % 8) * F(-1 if bit(b, 34, i) else 1)
    return f16(b, 0) * F(small(b, 74, i // 16) + 0.5) * F(0.25) * value


def iq3_xxs(b: bytes, i: int) -> np.float32:
    word = u32(b, 66, i // 32)
    value = entry("iq3_xxs", b[2 + i // 4], i % 4) * sign(word >> 7 * (i // 8 % 4) & 127, i % 8)
    return f16(b, 0) * F((word >> 28) + 0.5) * F(0.5) * value


def iq3_s(b: bytes, i: int) -> np.float32:
    value = entry("iq3_s", b[2 + i // 4] | bit(b, 66, i // 4) << 8, i % 4) * F(-1 if bit(b, 74, i) else 1)
    return f16(b, 0) * F(2 * small(b, 106, i // 32) + 1) * value


ELEMENTS: dict[str, Callable[[bytes, int], np.float32]] = {
    "q1_0": lambda b, i: f16(b, 0) if b[2 + i // 8] >> i % 8 & 1 else -f16(b, 0),
    "q2_0": lambda b, i: f16(b, 0) * F((b[2 + i // 4] >> 2 * (i % 4) & 3) - 1),
    "q4_0": lambda b, i: f16(b, 0) * F(nibble(b, 2, i) - 8),
    "q4_1": lambda b, i: f16(b, 0) * F(nibble(b, 4, i)) + f16(b, 2),
    "q5_0": lambda b, i: f16(b, 0) * F((nibble(b, 6, i) | (b[2 + i // 8] >> i % 8 & 1) << 4) - 16),
    "q5_1": lambda b, i: f16(b, 0) * F(nibble(b, 8, i) | (b[4 + i // 8] >> i % 8 & 1) << 4) + f16(b, 2),
    "q8_0": lambda b, i: f16(b, 0) * F(unpack_from("b", b, 2 + i)[0]),
    "q2_k": lambda b, i: f16(b, 80) * F(b[i // 16] & 15) * F(two(b, 16, i)) - f16(b, 82) * F(b[i // 16] >> 4),
    "q3_k": lambda b, i: f16(b, 108) * F(q3_scale(b, i // 16)) * F(two(b, 32, i) + 4 * (b[i % 32] >> i // 32 & 1) - 4),
    "q4_k": lambda b, i: (
        f16(b, 0) * F(six(b, i // 32)[0]) * F(nibble(b, 16, i, 32)) - f16(b, 2) * F(six(b, i // 32)[1])
    ),
    "q5_k": lambda b, i: (
        f16(b, 0) * F(six(b, i // 32)[0]) * F(nibble(b, 48, i, 32) | (b[16 + i % 32] >> i // 32 & 1) << 4)
        - f16(b, 2) * F(six(b, i // 32)[1])
    ),
    "q6_k": lambda b, i: (
        f16(b, 208) * F(unpack_from("b", b, 192 + i // 16)[0]) * F((nibble(b, 0, i, 64) | two(b, 128, i) << 4) - 32)
    ),
    **{form.__name__: form for form in (iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s)},
    "iq4_nl": lambda b, i: f16(b, 0) * F(TABLE[nibble(b, 2, i)]),
    "iq4_xs": lambda b, i: f16(b, 0) * F(iq4_scale(b, i // 32)) * F(TABLE[nibble(b, 8, i)]),
    "mxfp4": lambda b, i: F(2.0 ** (b[0] - 128)) * F(E2M1[nibble(b, 1, i)]),
    "nvfp4": lambda b, i: e4m3(b[i // 16]) * F(E2M1[nibble(b, 4, i, 8)]),
    "tq1_0": lambda b, i: f16(b, 52) * F(ternary(b, i) - 1),
    "tq2_0": lambda b, i: f16(b, 64) * F(two(b, 0, i) - 1),
}


def stored(type: str, rows: int = 3, per_row: int = 2) -> np.ndarray:
    """Return random blocks [blocks, bytes] whose scales are finite, and no power of MXFP4 past f32."""
    raw = np.random.default_rng(5).integers(0, 256, (rows * per_row, TYPES[type].nbytes), dtype=np.uint8)
    for offset, size in TYPES[type].wide:
        if size == 2:
            raw[:, offset + 1] &= 0xBB
    if type == "mxfp4":
        raw[:, 0] = [0, 1, 2, 120, 128, 250][: len(raw)]
    return raw


def tensor_of(type: str, raw: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    return Tensor.from_parts(GgmlBlocksLayout(type), {"blocks": raw.reshape(-1)}, shape, "x")


def test_every_type_has_a_formula_here() -> None:
    assert set(ELEMENTS) == set(TYPES)


@pytest.mark.parametrize("type", ELEMENTS)
def test_values_are_those_of_the_formula(type: str) -> None:
    raw, elements = stored(type), TYPES[type].elements
    shape = (3, 2 * elements)
    expected = np.array([[ELEMENTS[type](block.tobytes(), i) for i in range(elements)] for block in raw], F)
    tensor = tensor_of(type, raw, shape)
    expected = expected.reshape(shape)
    assert tensor.numpy().tobytes() == expected.tobytes()
    assert tensor.numpy("bf16").tobytes() == cast(expected, "bf16").tobytes()
    assert np.array_equal(tensor[1:, 5:9], expected[1:, 5:9])
    strided = np.empty((3, 4 * elements), F)[:, ::2]
    reader = BlocksCodec().reader(tensor)
    for row in range(3):
        reader.read_into(strided[row : row + 1])
    reader.finish()
    assert np.array_equal(strided, expected)


def test_many_blocks_are_decoded_in_steps() -> None:
    raw = np.tile(stored("q4_0"), (7000, 1))
    tensor = tensor_of("q4_0", raw, (42000, 32))  # more than one thread takes at a time
    expected = np.tile(tensor_of("q4_0", stored("q4_0"), (6, 32)).numpy(), (7000, 1))
    assert np.array_equal(tensor.numpy(), expected)
    rows = np.empty_like(expected)
    BlocksCodec().reader(tensor).read_into(rows)
    assert np.array_equal(rows, expected)


def test_integers_are_no_target() -> None:
    with pytest.raises(IngotError) as caught:
        tensor_of("q4_0", stored("q4_0"), (6, 32)).numpy("i8")
    assert caught.value.rule == "ggml_blocks.dtype"


def test_infinite_and_missing_scales_stay_what_they_are() -> None:
    raw = stored("q8_0", 1, 1)
    raw[0, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    assert np.isnan(tensor_of("q8_0", raw, (32,)).numpy("f16")).all()


@pytest.mark.parametrize(("type", "dtype"), [("mxfp4", "f32"), ("q4_1", "f16")])
def test_values_past_the_range_are_refused(type: str, dtype: str) -> None:
    raw = np.full((1, TYPES[type].nbytes), 0xFF if type == "mxfp4" else 0x77, np.uint8)
    with pytest.raises(IngotError) as caught:
        tensor_of(type, raw, (32,)).numpy(dtype)
    assert caught.value.rule == "ggml_blocks.overflow"


def test_what_does_not_fit_together_is_refused() -> None:
    tensor = tensor_of("q4_0", stored("q4_0"), (6, 32))
    part = tensor.parts["blocks"]
    for rule, changed in (
        ("params", {"params": {**tensor.params, "type": "q9"}}),
        ("params", {"params": {**tensor.params, "codec_version": 2}}),
        ("params", {"dtype": "f16"}),
        ("columns", {"shape": (12, 16)}),
        ("parts", {"parts": {"blocks": part, "more": part}}),
        ("dtype", {"parts": {"blocks": memory_part(np.zeros(108, np.int8), "i8")}}),
        ("size", {"shape": (7, 32)}),
    ):
        with pytest.raises(IngotError) as caught:
            replace(tensor, **changed).numpy()
        assert caught.value.rule == f"ggml_blocks.{rule}"
