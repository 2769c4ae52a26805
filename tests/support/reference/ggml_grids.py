"""What ggml's blocks of types IQ1 to IQ3 stand for: indices into grids, signs, and small scales (``spec/gguf.md``).

As in ``reference.ggml``: u8 [blocks, bytes] to f32 [blocks, elements], every product exact.
"""

from __future__ import annotations

import numpy as np

from ingot.codecs.blocks.grids import grid
from ingot.model.tensor import Array
from tests.support.reference.ggml_fields import f16, numbers

_EIGHTH = np.float32(0.125)
# Seven signs completed to eight: their number is even.
_EVEN = np.array([signs | (signs.bit_count() % 2) << 7 for signs in range(128)], np.uint8)


def _nibbles(stored: Array) -> Array:
    """Unpack each byte's low nibble, then its high one."""
    both = (stored[:, :, None] >> np.array([0, 4], np.uint8)) & np.uint8(15)
    return both.reshape(len(stored), -1)


def _signs(stored: Array) -> Array:
    """Return 1 or -1 for each bit of bytes [blocks, bytes], the lowest first: bits that are set mean minus."""
    bits = np.unpackbits(np.ascontiguousarray(stored), axis=1, bitorder="little")
    return np.where(bits == 0, np.float32(1), np.float32(-1))


def _sevens(words: Array) -> Array:
    """Unpack four times seven signs of each u32 [blocks, words]."""
    sevens = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    return _signs(_EVEN[sevens.reshape(len(words), -1)])


def _values(scales: Array, name: str, indices: Array, signs: Array) -> Array:
    """Multiply scales [blocks, groups], grid entries of indices [blocks, entries] and signs [blocks, elements]."""
    entries = grid(name)[indices].reshape(*scales.shape, -1)
    values: Array = (scales[:, :, None] * entries).reshape(len(scales), -1) * signs
    return values


def iq2_xxs(blocks: Array) -> Array:
    """Eight groups of 32: four indices of 8 bits, then signs and 4 bits of scale in one word."""
    words = numbers(blocks, 2, 66, "u32")
    rest = words[:, 1::2]
    scales = f16(blocks, 0) * (np.float32(0.5) + (rest >> np.uint32(28)).astype(np.float32)) * np.float32(0.25)
    indices = np.ascontiguousarray(blocks[:, 2:66]).reshape(len(blocks), 8, 8)[:, :, :4]
    return _values(scales, "iq2_xxs", indices.reshape(len(blocks), -1), _sevens(rest))


def _half_scales(blocks: Array, start: int) -> Array:
    """Return scales of sixteen groups of 16, a nibble each: ``d * (0.5 + scale) / 4``."""
    nibbles = _nibbles(blocks[:, start : start + 8]).astype(np.float32)
    scales: Array = f16(blocks, 0) * (np.float32(0.5) + nibbles) * np.float32(0.25)
    return scales


def iq2_xs(blocks: Array) -> Array:
    """32 words of 9 bits of index and 7 of signs."""
    words = numbers(blocks, 2, 66, "u16")
    signs = _signs(_EVEN[words >> np.uint16(9)])
    return _values(_half_scales(blocks, 66), "iq2_xs", words & np.uint16(511), signs)


def iq2_s(blocks: Array) -> Array:
    """32 bytes of indices, 32 of signs, 8 with two more bits for each index."""
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
    indices = blocks[:, 2:34] | (high.reshape(len(blocks), -1).astype(np.uint16) << np.uint16(8))
    return _values(_half_scales(blocks, 74), "iq2_s", indices, _signs(blocks[:, 34:66]))


def iq3_xxs(blocks: Array) -> Array:
    """64 bytes of indices, then for each of eight groups of 32 signs and 4 bits of scale in one word."""
    words = numbers(blocks, 66, 98, "u32")
    scales = f16(blocks, 0) * (np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32)) * np.float32(0.5)
    return _values(scales, "iq3_xxs", blocks[:, 2:66], _sevens(words))


def iq3_s(blocks: Array) -> Array:
    """64 bytes of indices, 8 with a ninth bit for each, 32 of signs, a nibble of scale for each group of 32."""
    high = np.unpackbits(np.ascontiguousarray(blocks[:, 66:74]), axis=1, bitorder="little").astype(np.uint16)
    indices = blocks[:, 2:66] | (high << np.uint16(8))
    scales = f16(blocks, 0) * (np.float32(1) + np.float32(2) * _nibbles(blocks[:, 106:110]).astype(np.float32))
    return _values(scales, "iq3_s", indices, _signs(blocks[:, 74:106]))


def _shifted(scales: Array, indices: Array, minus: Array) -> Array:
    """Return ``scale * (entry ± 1/8)``: scales and ``minus`` [blocks, entries], one for each index."""
    shift = np.where(minus, -_EIGHTH, _EIGHTH)
    values: Array = scales[:, :, None] * (grid("iq1")[indices] + shift[:, :, None])
    return values.reshape(len(scales), -1)


def iq1_s(blocks: Array) -> Array:
    """32 bytes of indices; for each of eight groups of 32 a word: three more bits of four indices, scale, shift."""
    words = numbers(blocks, 34, 50, "u16")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    indices = blocks[:, 2:34] | (high.reshape(len(blocks), -1) << np.uint16(8))
    scales = f16(blocks, 0) * (2 * ((words >> np.uint16(12)) & np.uint16(7)) + 1).astype(np.float32)
    return _shifted(np.repeat(scales, 4, axis=1), indices, np.repeat(words >= 0x8000, 4, axis=1))


def iq1_m(blocks: Array) -> Array:
    """32 bytes of indices, a nibble more of each (three bits and the shift), four words of scales with ``d`` on top."""
    words = numbers(blocks, 48, 56, "u16")
    top = (words >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(top, axis=1).view(np.float16).astype(np.float32)
    three = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    scales = d[:, None] * (2 * three.reshape(len(blocks), -1) + 1).astype(np.float32)
    nibbles = _nibbles(blocks[:, 32:48])
    indices = blocks[:, :32] | ((nibbles & np.uint8(7)).astype(np.uint16) << np.uint16(8))
    return _shifted(np.repeat(scales, 2, axis=1), indices, nibbles >= 8)
