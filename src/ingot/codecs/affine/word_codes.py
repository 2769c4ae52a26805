"""Conversion of codes and zero points between 32-bit words and bytes (``spec/affine_words.md``)."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import from_file
from ingot.model.layouts.packed_ints import AWQ, GPTQ_PLANES, GPTQ_V1, PLANES, PackedIntLayout
from ingot.model.tensor import Array

# The nibbles of an AWQ word that contain the outputs 0 to 7: the position of each in 0, 2, 4, 6, 1, 3, 5, 7.
AWQ_NIBBLES = tuple(int(nibble) for nibble in np.argsort([0, 2, 4, 6, 1, 3, 5, 7]))


def points_of(packed: Array, layout: PackedIntLayout) -> Array:
    """Unpack zero points from 32-bit words [groups, words] to u8 [groups, rows].

    If words are not full, the last columns are padding.
    """
    count = 32 * packed.shape[1] // layout.bits
    if layout.packing == GPTQ_PLANES:
        return join_planes(packed, layout.bits)
    if layout.packing != AWQ:
        return unpack_codes(packed, layout.bits, count, more=layout.packing == GPTQ_V1)
    stored = unpack_codes(packed, 4, count).reshape(-1, 8)
    points = np.empty_like(stored)
    for output, nibble in enumerate(AWQ_NIBBLES):
        points[:, output] = stored[:, nibble]
    return points.reshape(len(packed), -1)


def pack_points(points: Array, target: PackedIntLayout) -> Array:
    """Pack zero points, u8 [groups, rows], for a packing in which each group has a row of words."""
    if target.packing == AWQ:
        return _pack_awq(points)
    if target.packing == GPTQ_V1:
        points = points - np.uint8(1)
    return pack_planes(points, target.bits) if target.packing == GPTQ_PLANES else pack_words(points, target.bits)


def _pack_awq(points: Array) -> Array:
    """Pack zero points, u8 [groups, rows], as AWQ's words."""
    lanes = np.empty((len(points), points.shape[1] // 8, 8), np.uint8)
    for output, nibble in enumerate(AWQ_NIBBLES):
        lanes[:, :, nibble] = points[:, output::8]
    return pack_words(lanes.reshape(points.shape), 4)


def unpack_codes(packed: Array, bits: int, count: int, *, more: bool = False, loose: bool = False) -> Array:
    """Unpack the first ``count`` codes of each row of words: u8 [rows, count].

    If ``more`` is set, stored codes are 1 too small, and 1 is added to each, modulo 2**bits. If no code crosses words,
    the addition applies to complete words, because writers subtract in the same manner: carries between codes undo
    borrows. If ``loose`` is set, no code crosses words, and the highest bits of a word are unused.
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
    unpacked = np.unpackbits(np.ascontiguousarray(packed).astype("<u4").view(np.uint8), axis=1, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes: Array = (unpacked[:, : count * bits].reshape(len(packed), count, bits) * weights).sum(axis=2, dtype=np.uint8)
    if more:
        codes = (codes + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return codes


def sign_extend(codes: Array, bits: int) -> Array:
    """Convert ``bits``-bit numbers in two's complement to 8 bits."""
    return codes << np.uint8(8 - bits) >> np.uint8(8 - bits) | -(codes >> np.uint8(bits - 1)) << np.uint8(bits)


def join_planes(packed: Array, bits: int) -> Array:
    """Return the codes of words in bit planes, ``bits`` words for 32 codes; u8 [rows, codes]."""
    blocks = packed.reshape(len(packed), -1, bits)
    codes, plane = np.zeros((*blocks.shape[:2], 32), np.uint8), 0
    for width, low in PLANES[bits]:
        shifts = np.arange(0, 32, width, dtype=np.uint32)
        lanes = (blocks[:, :, plane : plane + width, None] >> shifts) & np.uint32((1 << width) - 1)
        codes |= lanes.astype(np.uint8).reshape(codes.shape) << np.uint8(low)
        plane += width
    return codes.reshape(len(packed), -1)


def pack_planes(codes: Array, bits: int) -> Array:
    """Undo ``join_planes``: convert u8 [rows, codes], codes a multiple of 32, to u32 [rows, words]."""
    blocks = codes.astype(np.uint8).reshape(len(codes), -1, 32)
    packed, plane = np.empty((*blocks.shape[:2], bits), np.uint32), 0
    for width, low in PLANES[bits]:
        shifts = np.arange(0, 32, width, dtype=np.uint32)
        lanes = (blocks >> np.uint8(low) & np.uint8((1 << width) - 1)).reshape(*blocks.shape[:2], width, -1)
        np.bitwise_or.reduce(lanes.astype(np.uint32) << shifts, axis=3, out=packed[:, :, plane : plane + width])
        plane += width
    return packed.reshape(len(codes), -1)


def pack_words(codes: Array, bits: int) -> Array:
    """Pack codes [rows, count] as 32-bit words, one stream per row, low bits first: u32 [rows, words]."""
    rows, count = codes.shape
    if 8 % bits == 0:
        padded = np.zeros((rows, -(-count * bits // 32) * 4, 8 // bits), np.uint8)
        padded.reshape(rows, -1)[:, :count] = codes
        joined = padded[:, :, 0].copy()
        for index in range(1, 8 // bits):
            joined |= padded[:, :, index] << (index * bits)
        return from_file(joined.reshape(-1), "u32").reshape(rows, -1)
    bit_array = np.zeros((rows, -(-count * bits // 32) * 32), np.uint8)
    spread = (codes.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    bit_array[:, : count * bits] = spread.reshape(rows, count * bits)
    return from_file(np.packbits(bit_array, axis=1, bitorder="little").reshape(-1), "u32").reshape(rows, -1)


def stream(codes: Array, bits: int) -> Array:
    """Pack codes, u8 [rows, count], as one bit stream per row, low bits first: u8 [rows, bytes]."""
    spread = (codes.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(spread.reshape(len(codes), -1), axis=1, bitorder="little")
