"""Fuzzes the reader of the encoding ``ingot.packed/1``: any stored bytes decode, or end in a FormatError.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_packed -max_total_time=600

Findings are written to the current folder as crash-*; ``python -m tests.fuzz.fuzz_packed crash-...`` replays one. By
its first byte an input is a frame of one of the layouts, a whole part, or changes to a valid part. After such changes
the checksum of the index is corrected, so that the checks behind it are reached.
"""

from __future__ import annotations

from struct import pack, unpack

import atheris
import numpy as np

from ingot.core.bytes import packed
from ingot.core.runtime import native
from ingot.errors import IngotError
from tests.fuzz.common import fuzz
from tests.support.reading import checked
from tests.unit.core.bytes.test_packed import LAYOUTS, decode, encode, skewed

RECORDS = 40
CASES = [(layout, skewed(RECORDS * layout.record + 1)) for layout in LAYOUTS.values()]
PARTS = [encode(layout, content) for layout, content in CASES]
END = 24


def corrected(part: bytes) -> bytes:
    """Return the stored bytes with the right checksum of the index, if they have room for one."""
    if len(part) < END:
        return part
    layout_bytes, count, content, _, magic = unpack("<IIII8s", part[-END:])
    start = len(part) - END - 8 * count - layout_bytes
    if start < 0:
        return part
    digest = native.crc32c(part[start:-END] + pack("<IIII8s", layout_bytes, count, content, 0, magic), 0)
    return part[:-END] + pack("<IIII8s", layout_bytes, count, content, digest, magic)


def changed_part(data: atheris.FuzzedDataProvider) -> tuple[bytes, int]:
    """Return a valid part of a case with a few other bytes, and its decoded size."""
    index = data.ConsumeIntInRange(0, len(CASES) - 1)
    part = bytearray(PARTS[index])
    for _ in range(data.ConsumeIntInRange(1, 8)):
        back = data.ConsumeBool()  # most checks concern the index at the end
        limit = min(len(part), 1000) if back else len(part)
        position = data.ConsumeIntInRange(0, limit - 1)
        part[len(part) - 1 - position if back else position] = data.ConsumeIntInRange(0, 255)
    return corrected(bytes(part)), len(CASES[index][1])


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    choice, raw = data[:1], data[1:]
    try:
        if choice < b"\x60":
            layout, content = CASES[raw[0] % len(CASES)] if raw else CASES[0]
            packed.decode_frame(layout, raw[1:], np.zeros(len(content), np.uint8), "part")
        elif choice < b"\x80":
            decode(raw, 1000)
        else:
            decode(*changed_part(atheris.FuzzedDataProvider(raw)))
    except IngotError as error:
        checked(error)


if __name__ == "__main__":
    fuzz(one_input, [b"\0" + bytes((index,)) + packed.encode_frame(*case) for index, case in enumerate(CASES)])
