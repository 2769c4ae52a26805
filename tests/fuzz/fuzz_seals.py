"""Fuzzes seals: any bytes beside a file are a seal of it or end in an IngotError, as it is verified and repaired.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_seals -max_total_time=600

Findings are written to the current folder as crash-*; ``python -m tests.fuzz.fuzz_seals crash-...`` replays one. By its
first byte an input is a seal as it is, or a series of choices that change fields of the right one.
"""

from __future__ import annotations

import json
from base64 import b64encode

import atheris
import numpy as np

from ingot.errors import IngotError
from ingot.model.bytesource import MemorySource
from ingot.model.seal import HEAD, parse_seal, seal_of
from ingot.stores.remote.sealed_reader import SealedReader
from tests.fuzz.common import VALUES, as_json, changed, fuzz
from tests.support.reading import checked

FILE = np.random.default_rng(0).bytes((1 << 20) + 777)
SOURCE = MemorySource(FILE, "file")
RIGHT = json.loads(seal_of(SOURCE).encoded())
CHOICES = [*VALUES, *RIGHT.values(), "sha256:" + "0" * 64, "crc32c:00000000", "sha256:", "md5:00", 1 << 12, 1 << 23]
CHOICES += [b64encode(bytes(32 * count)).decode() for count in (1, 2, 3, 4, 5, 800)]


def read(raw: bytes) -> None:
    """Parse a seal, compare the file with it, and read the file as from another machine."""
    seal = parse_seal(raw, "file.ingot.json")
    if parse_seal(seal.encoded(), "again") != seal:
        raise AssertionError("expected a seal that is written as it was read")
    seal.require_size(len(FILE), "file")
    seal.damaged_chunks(SOURCE)

    def fetch(start: int, out: memoryview) -> None:
        out[:] = FILE[start : start + out.nbytes]

    proven = SealedReader(seal, fetch, "file")
    proven.check_head(memoryview(FILE)[:HEAD])
    out = bytearray(49_000)
    proven.read([(1_000_000, memoryview(out))])
    if bytes(out) != FILE[1_000_000:1_049_000]:
        raise AssertionError("expected the bytes of the file")


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    raw = data[1:] if data[:1] >= b"\xc0" else as_json(changed(atheris.FuzzedDataProvider(data[1:]), RIGHT, CHOICES))
    try:
        read(raw)
    except IngotError as error:
        checked(error)


if __name__ == "__main__":
    fuzz(one_input, [b"\xff" + as_json(RIGHT)])
