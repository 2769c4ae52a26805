"""Levels and scales to ggml's blocks, in NumPy: the other way round than ``tests.support.reference.ggml``.

Packers take d and the minimum's scale as bytes [blocks, 1 or 2], steps and minimums [blocks, groups], and levels
[blocks, elements] as the values that codes stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ingot.model.tensor import Array

Pack = Callable[[Array, Array, Array, Array, Array], Array]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12])


def _codes(levels: Array, low: int) -> Array:
    return (levels.astype(np.int32) - low).astype(np.uint8)


def _fields(codes: Array, run: int, bits: int, per_byte: int) -> Array:
    """Pack the low ``bits`` of codes: of each run of bytes the lowest fields of all of them first."""
    runs = (codes & np.uint8((1 << bits) - 1)).reshape(len(codes), -1, per_byte, run)
    shifts = (np.arange(per_byte, dtype=np.uint8) * np.uint8(8 // per_byte)).reshape(1, 1, -1, 1)
    packed: Array = np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(codes), -1)
    return packed


def _join(*pieces: Array) -> Array:
    return np.concatenate([piece.astype(np.uint8) for piece in pieces], axis=1)


def _four(low: int, *, offset: bool) -> Pack:
    def pack(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
        return _join(d, *([least] if offset else []), _fields(_codes(levels, low), 16, 4, 2))

    return pack


def _five(low: int, *, offset: bool) -> Pack:
    def pack(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
        codes = _codes(levels, low)
        top = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
        return _join(d, *([least] if offset else []), top, _fields(codes, 16, 4, 2))

    return pack


def _q8_0(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    return _join(d, levels.astype(np.int8).view(np.uint8))


def _iq4_nl(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    return _join(d, _fields(np.searchsorted(_IQ4, levels).astype(np.uint8), 16, 4, 2))


def _mxfp4(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    codes = np.searchsorted(_E2M1, np.abs(levels)) + 8 * (levels < 0)
    return _join(d, _fields(codes.astype(np.uint8), 16, 4, 2))


def _q2_k(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    return _join(steps | minimums << 4, _fields(_codes(levels, 0), 32, 2, 4), d, least)


def _q3_k(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    codes, scales = _codes(levels, -4), (steps + 32).astype(np.uint8)
    low, high = _fields(scales, 8, 4, 2), _fields(scales >> np.uint8(4), 4, 2, 4)
    return _join(_fields(codes >> np.uint8(2), 32, 1, 8), _fields(codes, 32, 2, 4), low, high, d)


def _six_bits(steps: Array, minimums: Array) -> Array:
    s, m = steps.astype(np.uint8), minimums.astype(np.uint8)
    top = np.uint8(0x30)
    first, second = s[:, :4] | (s[:, 4:] & top) << np.uint8(2), m[:, :4] | (m[:, 4:] & top) << np.uint8(2)
    return _join(first, second, (s[:, 4:] & np.uint8(15)) | (m[:, 4:] & np.uint8(15)) << np.uint8(4))


def _q4_k(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    return _join(d, least, _six_bits(steps, minimums), _fields(_codes(levels, 0), 32, 4, 2))


def _q5_k(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    codes = _codes(levels, 0)
    top = _fields(codes >> np.uint8(4), 32, 1, 8)
    return _join(d, least, _six_bits(steps, minimums), top, _fields(codes, 32, 4, 2))


def _q6_k(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    codes = _codes(levels, -32)
    low, high = _fields(codes, 64, 4, 2), _fields(codes >> np.uint8(4), 32, 2, 4)
    return _join(low, high, steps.astype(np.int8).view(np.uint8), d)


def _iq4_xs(d: Array, least: Array, steps: Array, minimums: Array, levels: Array) -> Array:
    scales = (steps + 32).astype(np.uint16)
    high = np.bitwise_or.reduce((scales >> 4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1).astype("<u2")
    low = (scales[:, ::2] & 15) | (scales[:, 1::2] & 15) << 4
    codes = np.searchsorted(_IQ4, levels).astype(np.uint8)
    return _join(d, high.view(np.uint8).reshape(-1, 2), low, _fields(codes, 16, 4, 2))


PACKERS: Mapping[str, Pack] = {
    "q4_0": _four(-8, offset=False),
    "q4_1": _four(0, offset=True),
    "q5_0": _five(-16, offset=False),
    "q5_1": _five(0, offset=True),
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
    "mxfp4": _mxfp4,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_xs": _iq4_xs,
}
"""By type of block."""
