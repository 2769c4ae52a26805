"""Codes and zero points in words of 32 bits, as bytes and back (``spec/affine_words.md``)."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import from_file
from ingot.model.layouts.packed_words import AWQ, GPTQ_PLANES, GPTQ_V1, PLANES, WordsLayout
from ingot.model.tensor import Array

# The nibbles of an AWQ word that hold the outputs 0 to 7: where each stands in 0, 2, 4, 6, 1, 3, 5, 7.
AWQ_PLACES = tuple(int(place) for place in np.argsort([0, 2, 4, 6, 1, 3, 5, 7]))


def points_of(packed: Array, layout: WordsLayout) -> Array:
    """Return the zero points of words [groups, words of rows] as integers, u8 [groups, rows]; the last may be none."""
    count = 32 * packed.shape[1] // layout.bits
    if layout.form == GPTQ_PLANES:
        return joined_planes(packed, layout.bits)
    if layout.form != AWQ:
        return unpacked(packed, layout.bits, count, more=layout.form == GPTQ_V1)
    stored = unpacked(packed, 4, count).reshape(-1, 8)
    points = np.empty_like(stored)
    for output, place in enumerate(AWQ_PLACES):
        points[:, output] = stored[:, place]
    return points.reshape(len(packed), -1)


def packed_points(points: Array, target: WordsLayout) -> Array:
    """Return zero points, u8 [groups, rows], as a form packs them that has groups as lines."""
    if target.form == AWQ:
        return _awq_words(points)
    if target.form == GPTQ_V1:
        points = points - np.uint8(1)
    return plane_words(points, target.bits) if target.form == GPTQ_PLANES else packed_words(points, target.bits)


def _awq_words(points: Array) -> Array:
    """Return zero points, [groups, rows], as AWQ's words."""
    lanes = np.empty((len(points), points.shape[1] // 8, 8), np.uint8)
    for output, place in enumerate(AWQ_PLACES):
        lanes[:, :, place] = points[:, output::8]
    return packed_words(lanes.reshape(points.shape), 4)


def unpacked(packed: Array, bits: int, count: int, *, more: bool = False, loose: bool = False) -> Array:
    """Return the first ``count`` codes of each row of words, u8 [rows, count].

    With ``more`` each is stored less by one. Where codes do not cross words one is added to the whole word, as those
    who wrote 0 less 1 took it off: the carry undoes the borrow. Else each code is counted modulo 2**bits. ``loose``: no
    code crosses words, and spare bits are on top.
    """
    shifts = np.arange(0, 32 // bits * bits, bits, dtype=np.uint32)
    if more and (32 % bits == 0 or loose):
        packed = packed + np.uint32(sum(1 << int(shift) for shift in shifts))
    if 8 % bits == 0:
        stored = np.ascontiguousarray(packed).astype("<u4", copy=False).view(np.uint8)
        spread = np.empty((*stored.shape, 8 // bits), np.uint8)
        for index in range(8 // bits):
            spread[:, :, index] = stored >> (index * bits) & ((1 << bits) - 1)
        return spread.reshape(len(stored), -1)[:, :count]
    if 32 % bits == 0 or loose:
        lanes = (packed[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
        return lanes.astype(np.uint8).reshape(len(packed), -1)[:, :count]
    ones = np.unpackbits(np.ascontiguousarray(packed).astype("<u4").view(np.uint8), axis=1, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes: Array = (ones[:, : count * bits].reshape(len(packed), count, bits) * weights).sum(axis=2, dtype=np.uint8)
    if more:
        codes = (codes + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return codes


def signed(codes: Array, bits: int) -> Array:
    """Return unsigned numbers of so many bits as what they are in two's complement, a byte each."""
    return codes << np.uint8(8 - bits) >> np.uint8(8 - bits) | -(codes >> np.uint8(bits - 1)) << np.uint8(bits)


def joined_planes(packed: Array, bits: int) -> Array:
    """Return the codes of rows of words in planes, ``bits`` words for 32 codes; u8 [rows, codes]."""
    blocks = packed.reshape(len(packed), -1, bits)
    codes, at = np.zeros((*blocks.shape[:2], 32), np.uint8), 0
    for width, low in PLANES[bits]:
        shifts = np.arange(0, 32, width, dtype=np.uint32)
        lanes = (blocks[:, :, at : at + width, None] >> shifts) & np.uint32((1 << width) - 1)
        codes |= lanes.astype(np.uint8).reshape(codes.shape) << np.uint8(low)
        at += width
    return codes.reshape(len(packed), -1)


def plane_words(codes: Array, bits: int) -> Array:
    """Undo ``joined_planes``: u8 [rows, codes in 32s] to u32 [rows, words]."""
    blocks = codes.astype(np.uint8).reshape(len(codes), -1, 32)
    packed, at = np.empty((*blocks.shape[:2], bits), np.uint32), 0
    for width, low in PLANES[bits]:
        shifts = np.arange(0, 32, width, dtype=np.uint32)
        lanes = (blocks >> np.uint8(low) & np.uint8((1 << width) - 1)).reshape(*blocks.shape[:2], width, -1)
        np.bitwise_or.reduce(lanes.astype(np.uint32) << shifts, axis=3, out=packed[:, :, at : at + width])
        at += width
    return packed.reshape(len(codes), -1)


def packed_words(codes: Array, bits: int) -> Array:
    """Return codes, [rows, count], as words of 32 bits, one stream a row, low bits first; u32 [rows, words]."""
    rows, count = codes.shape
    if 8 % bits == 0:
        padded = np.zeros((rows, -(-count * bits // 32) * 4, 8 // bits), np.uint8)
        padded.reshape(rows, -1)[:, :count] = codes
        joined = padded[:, :, 0].copy()
        for index in range(1, 8 // bits):
            joined |= padded[:, :, index] << (index * bits)
        return from_file(joined.reshape(-1), "u32").reshape(rows, -1)
    ones = np.zeros((rows, -(-count * bits // 32) * 32), np.uint8)
    spread = (codes.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    ones[:, : count * bits] = spread.reshape(rows, count * bits)
    return from_file(np.packbits(ones, axis=1, bitorder="little").reshape(-1), "u32").reshape(rows, -1)


def stream(codes: Array, bits: int) -> Array:
    """Return codes, [rows, count], as a bit stream a row, low bits first; u8 [rows, bytes]."""
    spread = (codes.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(spread.reshape(len(codes), -1), axis=1, bitorder="little")
