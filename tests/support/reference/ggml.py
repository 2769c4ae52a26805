"""What ggml's blocks stand for (``spec/gguf.md``): functions of u8 [blocks, bytes] that give f32 [blocks, elements].

Products of scales and integers have at most 24 significant bits and are exact in f32, so that their order does not
matter; a minimum that is subtracted or added is the one rounding. Equal to the package gguf to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ingot.model.tensor import Array
from tests.support.reference.ggml_fields import f16, numbers
from tests.support.reference.ggml_grids import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs

Decode = Callable[[Array], Array]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Twice the values of E2M1. Code 8, which is minus zero, decodes to zero, as in ggml's table of integers.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _fields(stored: Array, run: int, bits: int, per_byte: int) -> Array:
    """Unpack fields of ``bits`` bits: of each run of bytes the lowest fields of all bytes, then the next ones."""
    shifts = (np.arange(per_byte, dtype=np.uint8) * np.uint8(8 // per_byte)).reshape(1, 1, -1, 1)
    runs = stored.reshape(len(stored), -1, 1, run)
    fields: Array = (runs >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(stored), -1)


def _scaled(scales: Array, numbers: Array) -> Array:
    """Multiply runs of ``numbers`` [blocks, elements] by ``scales`` [blocks, runs]."""
    grouped = numbers.reshape(*scales.shape, -1)
    product: Array = scales[:, :, None] * grouped
    return product.reshape(len(numbers), -1)


def q1_0(blocks: Array) -> Array:
    """``w = d`` where the bit is set, else ``-d``."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, f16(blocks, 0), -f16(blocks, 0))


def q2_0(blocks: Array) -> Array:
    """``w = d * (q - 1)``, four elements a byte, the lowest bits first."""
    shifts = np.array([0, 2, 4, 6], np.uint8)
    q = ((blocks[:, 2:, None] >> shifts) & np.uint8(3)).reshape(len(blocks), -1)
    values: Array = f16(blocks, 0) * (q.astype(np.float32) - np.float32(1))
    return values


def q4_0(blocks: Array) -> Array:
    """``w = d * (q - 8)``."""
    values: Array = f16(blocks, 0) * (_fields(blocks[:, 2:], 16, 4, 2).astype(np.float32) - np.float32(8))
    return values


def q4_1(blocks: Array) -> Array:
    """``w = d * q + m``."""
    values: Array = f16(blocks, 0) * _fields(blocks[:, 4:], 16, 4, 2).astype(np.float32) + f16(blocks, 2)
    return values


def _five(blocks: Array, high: int) -> Array:
    top = np.unpackbits(np.ascontiguousarray(blocks[:, high : high + 4]), axis=1, bitorder="little")
    values: Array = (_fields(blocks[:, high + 4 :], 16, 4, 2) | (top << np.uint8(4))).astype(np.float32)
    return values


def q5_0(blocks: Array) -> Array:
    """``w = d * (q - 16)``."""
    values: Array = f16(blocks, 0) * (_five(blocks, 2) - np.float32(16))
    return values


def q5_1(blocks: Array) -> Array:
    """``w = d * q + m``."""
    values: Array = f16(blocks, 0) * _five(blocks, 4) + f16(blocks, 2)
    return values


def q8_0(blocks: Array) -> Array:
    """``w = d * q``."""
    values: Array = f16(blocks, 0) * numbers(blocks, 2, 34, "i8").astype(np.float32)
    return values


def q2_k(blocks: Array) -> Array:
    """``w = d * scale * q - dmin * min``, sixteen groups of 16; scale in the low nibble, min in the high one."""
    scales, mins = (blocks[:, :16] & np.uint8(15)), (blocks[:, :16] >> np.uint8(4))
    values = _scaled(
        f16(blocks, 80) * scales.astype(np.float32), _fields(blocks[:, 16:80], 32, 2, 4).astype(np.float32)
    )
    return _less_minimum(values, f16(blocks, 82) * mins.astype(np.float32))


def _less_minimum(values: Array, minimum: Array) -> Array:
    grouped = values.reshape(*minimum.shape, -1)
    grouped -= minimum[:, :, None]
    return values


def q3_k(blocks: Array) -> Array:
    """``w = d * (scale - 32) * (q - 4)``, sixteen groups of 16."""
    low = _fields(blocks[:, 96:104], 8, 4, 2)
    high = _fields(blocks[:, 104:108], 4, 2, 4)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    top = _fields(blocks[:, :32], 32, 1, 8)
    q = (_fields(blocks[:, 32:96], 32, 2, 4) | (top << np.uint8(2))).astype(np.float32) - np.float32(4)
    return _scaled(f16(blocks, 108) * scales, q)


def _six_bits(blocks: Array) -> tuple[Array, Array]:
    """Return scales and minimums of Q4_K and Q5_K, times ``d`` and ``dmin``: eight of each, in 12 bytes at 4."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    low, two = np.uint8(15), np.uint8(0x30)
    scales = np.concatenate([first & np.uint8(63), (both & low) | ((first >> np.uint8(2)) & two)], axis=1)
    mins = np.concatenate([second & np.uint8(63), (both >> np.uint8(4)) | ((second >> np.uint8(2)) & two)], axis=1)
    return f16(blocks, 0) * scales.astype(np.float32), f16(blocks, 2) * mins.astype(np.float32)


def q4_k(blocks: Array) -> Array:
    """``w = d * scale * q - dmin * min``, eight groups of 32."""
    scales, mins = _six_bits(blocks)
    return _less_minimum(_scaled(scales, _fields(blocks[:, 16:], 32, 4, 2).astype(np.float32)), mins)


def q5_k(blocks: Array) -> Array:
    """``w = d * scale * q - dmin * min``, eight groups of 32; the fifth bits in 32 bytes at 16."""
    scales, mins = _six_bits(blocks)
    q = _fields(blocks[:, 48:], 32, 4, 2) | (_fields(blocks[:, 16:48], 32, 1, 8) << np.uint8(4))
    return _less_minimum(_scaled(scales, q.astype(np.float32)), mins)


def q6_k(blocks: Array) -> Array:
    """``w = d * scale * (q - 32)``, sixteen groups of 16."""
    q = _fields(blocks[:, :128], 64, 4, 2) | (_fields(blocks[:, 128:192], 32, 2, 4) << np.uint8(4))
    scales = numbers(blocks, 192, 208, "i8").astype(np.float32)
    return _scaled(f16(blocks, 208) * scales, q.astype(np.float32) - np.float32(32))


def iq4_nl(blocks: Array) -> Array:
    """``w = d * table[q]``."""
    values: Array = f16(blocks, 0) * _IQ4[_fields(blocks[:, 2:], 16, 4, 2)]
    return values


def iq4_xs(blocks: Array) -> Array:
    """``w = d * (scale - 32) * table[q]``, eight groups of 32."""
    low = ((blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)) & np.uint8(15)).reshape(len(blocks), 8)
    high = (numbers(blocks, 2, 4, "u16") >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scales = (low | (high << np.uint16(4))).astype(np.float32) - np.float32(32)
    return _scaled(f16(blocks, 0) * scales, _IQ4[_fields(blocks[:, 8:], 16, 4, 2)])


def mxfp4(blocks: Array) -> Array:
    """``w = 2**(e - 128) * table[q]``, the table twice E2M1's values."""
    power = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    values: Array = power.astype(np.float32) * _E2M1[_fields(blocks[:, 1:], 16, 4, 2)]
    return values


def nvfp4(blocks: Array) -> Array:
    """``w = scale / 2 * table[q]``, four groups of 16; scales are E4M3 without a sign, 0x7F stands for 0."""
    stored = blocks[:, :4]
    exponent, mantissa = (
        ((stored >> np.uint8(3)) & np.uint8(15)).astype(np.int32),
        (stored & np.uint8(7)).astype(np.int32),
    )
    normal = np.ldexp((mantissa + 8).astype(np.float32), exponent - 11)
    scales = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float32), -10), normal)
    scales[(stored == 0) | (stored == 0x7F)] = 0
    return _scaled(scales.astype(np.float32), _E2M1[_fields(blocks[:, 4:], 8, 4, 2)])


def tq1_0(blocks: Array) -> Array:
    """``w = d * (q - 1)``, five elements a byte in base 3, the last 16 four a byte."""
    threes = np.array([1, 3, 9, 27, 81], np.uint8)
    pieces = []
    for stored, run, digits in ((blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4)):
        turned = stored.reshape(len(blocks), -1, 1, run) * threes[:digits].reshape(1, 1, -1, 1)  # modulo 256
        pieces.append(((turned.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).reshape(len(blocks), -1))
    values: Array = f16(blocks, 52) * (np.concatenate(pieces, axis=1).astype(np.float32) - np.float32(1))
    return values


def tq2_0(blocks: Array) -> Array:
    """``w = d * (q - 1)``."""
    values: Array = f16(blocks, 64) * (_fields(blocks[:, :64], 32, 2, 4).astype(np.float32) - np.float32(1))
    return values


DECODERS: Mapping[str, Decode] = {
    decode.__name__: decode
    for decode in (
        *(q1_0, q2_0, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k),
        *(iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s),
        *(iq4_nl, iq4_xs, mxfp4, nvfp4, tq1_0, tq2_0),
    )
}
"""By type of block."""
