"""Logarithms and frequencies of ``float_entropy`` and ``delta_exact``, by which ANS and rANS code."""

from __future__ import annotations

from collections.abc import Sequence


def log2_fixed(value: int) -> int:
    """Return log2 with 12 fractional bits, truncated."""
    whole = value.bit_length() - 1
    mantissa = value << 31 - whole if whole <= 31 else value >> whole - 31
    for _ in range(12):
        mantissa = mantissa * mantissa >> 31
        bit = mantissa >> 32
        mantissa >>= bit
        whole = whole << 1 | bit
    return whole


def ideal_bytes(counts: Sequence[int]) -> int:
    total = sum(counts)
    bits = sum(count * (log2_fixed(total) - log2_fixed(count)) for count in counts if count)
    return -(-bits // (8 << 12))


def frequencies(counts: Sequence[int], bits: int = 13) -> list[int]:
    """Scale counts to a sum of ``2**bits``: nearest, at least 1; the rest goes round by falling counts."""
    total, scale = sum(counts), 1 << bits
    freq = [max(1, (count * scale + total // 2) // total) if count else 0 for count in counts]
    order = sorted((-count, value) for value, count in enumerate(counts) if count)
    left, i = scale - sum(freq), 0
    while left:
        value = order[i % len(order)][1]
        i += 1
        if left < 0 and freq[value] == 1:
            continue
        step = 1 if left > 0 else -1
        freq[value] += step
        left -= step
    return freq


def frequency_table(freq: Sequence[int]) -> bytes:
    present = [value for value, count in enumerate(freq) if count]
    out = present[0].to_bytes(2, "little") + present[-1].to_bytes(2, "little")
    value = present[0]
    while value <= present[-1]:
        if freq[value]:
            out += freq[value].to_bytes(1, "big") if freq[value] < 128 else (0x8000 | freq[value]).to_bytes(2, "big")
            value += 1
            continue
        run = 1
        while run < 256 and not freq[value + run]:
            run += 1
        out += bytes((0, run - 1))
        value += run
    return out


def read_frequencies(data: bytes, at: int = 0) -> tuple[list[int], int]:
    """Invert ``frequency_table``; return where it ends too."""
    value, last = int.from_bytes(data[at : at + 2], "little"), int.from_bytes(data[at + 2 : at + 4], "little")
    at, freq = at + 4, [0] * (last + 1)
    while value <= last:
        freq[value] = data[at] if data[at] < 128 else (data[at] & 127) << 8 | data[at + 1]
        at += 1 + (data[at] >= 128)
        value += 1
        if not freq[value - 1]:
            value += data[at]
            at += 1
    return freq, at
