"""Fuzzes the .zt reader: any bytes open, list and decode, or end in an IngotError. Nothing else may escape.

    pip install '.[fuzz]'
    python tests/fuzz/fuzz_zt.py -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python tests/fuzz/fuzz_zt.py crash-...``. Half of the inputs are taken as a manifest with blobs around it, so that the fuzzer
need not find out the footer's size field.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ingot"]):
    from ingot.core import cbor
    from ingot.errors import IngotError
    from ingot.formats.zt.reader import read_catalog
    from ingot.model.bytesource import MemorySource
    from ingot.testing.zt import zt_file

CORPUS = Path(__file__).parent.parent / "golden" / "zt"
# Parts that claim more are listed but not decoded: the rules allow them, and the fuzzer's time is for other things.
MAX_DECODED = 1 << 24


def read_all(data: bytes) -> None:
    """Open, list, and decode every part twice: whole, and a range."""
    catalog = read_catalog(MemorySource(data, "fuzz"))
    for tensor in catalog.tensors.values():
        repr(tensor)
        for part in tensor.parts.values():
            if part.nbytes > MAX_DECODED:
                continue
            try:
                part.array()
                part.readinto(0, memoryview(bytearray(min(part.nbytes, 8))))
            except IngotError as error:
                check(error)


def check(error: IngotError) -> None:
    """An error names its rule and is one line."""
    if not error.rule or "\n" in str(error):
        raise AssertionError(f"an error without a rule, or of several lines: {error!r}")


def test_one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    files = [data[1:]]
    if data[:1] < b"\x80":
        files = [zt_file(data[1:], {64: bytes(range(256))})]
    for file in files:
        try:
            read_all(file)
        except IngotError as error:
            check(error)


def seeds(folder: Path) -> None:
    """Write every golden file as it is, and its manifest alone."""
    for index, path in enumerate(sorted(CORPUS.rglob("*.zt"))):
        data = path.read_bytes()
        (folder / f"{index}-file").write_bytes(b"\xff" + data)
        size = int.from_bytes(data[-16:-8], "little")
        if 0 < size < len(data) - 16:
            (folder / f"{index}-manifest").write_bytes(b"\x00" + data[-16 - size : -16])
    words = [
        "dtype",
        "offset",
        "length",
        "type",
        "encoding",
        "zstd",
        "digest",
        "uncompressed_length",
        "shape",
        "format",
    ]
    (folder / "words").write_bytes(b"\x00" + cbor.dumps(words))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), "-max_len=65536"], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
