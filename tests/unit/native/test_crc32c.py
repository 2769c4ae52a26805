"""CRC-32C by instruction, by table, and by the definition."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from ingot.core.runtime import native

# RFC 3720 appendix B.4.
VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


def by_definition(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize(("data", "value"), VECTORS)
def test_known_values(data: bytes, value: int) -> None:
    assert native.crc32c(data) == value
    assert native.kernels.crc32c_by_table(data) == value
    assert by_definition(data) == value


def test_every_length_and_start() -> None:
    data = np.random.default_rng(1).bytes(6000)
    for size in [*range(70), 255, 256, 257, 767, 768, 769, 775, 1535, 1536, 5990]:
        for start in (0, 1, 5):
            piece = data[start : start + size]
            assert native.crc32c(piece, 77) == native.kernels.crc32c_by_table(piece, 77), (start, size)


@pytest.mark.parametrize("size", [0, 1, 7, 4096, 5000])
def test_sums_of_pieces_combine(size: int) -> None:
    data = np.random.default_rng(3).bytes(5000)
    first, second = data[: 5000 - size], data[5000 - size :]
    assert native.crc32c_combine(native.crc32c(first), native.crc32c(second), size) == native.crc32c(data)


def test_a_combined_sum_knows_lengths_of_64_bits() -> None:
    """Behind 2**40 zero bytes, in two steps and in one."""
    step = native.crc32c_combine(1, 0, (1 << 40) - 5)
    assert native.crc32c_combine(step, 0, 5) == native.crc32c_combine(1, 0, 1 << 40)
    assert native.crc32c_combine(0x12345678, 0, 1 << 63) == native.crc32c_combine(
        native.crc32c_combine(0x12345678, 0, 1 << 62), 0, 1 << 62
    )


def test_pieces_continue() -> None:
    data = np.random.default_rng(2).bytes(5000)
    whole = native.crc32c(data)
    for cut in (0, 1, 8, 767, 768, 1000, 4999, 5000):
        assert native.crc32c(data[cut:], native.crc32c(data[:cut])) == whole


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux says what the processor can do")
def test_the_instruction_is_used_where_the_processor_has_it() -> None:
    if platform.machine() == "aarch64":
        hwcap, crc32 = 16, 1 << 7  # AT_HWCAP of <elf.h>, HWCAP_CRC32 of <asm/hwcap.h>
        expected = bool(ctypes.CDLL(None).getauxval(ctypes.c_ulong(hwcap)) & crc32)
    elif platform.machine() == "x86_64":
        expected = " sse4_2 " in Path("/proc/cpuinfo").read_text("ascii", "replace")
    else:
        expected = False
    assert native.kernels.crc32c_has_instruction() == expected
