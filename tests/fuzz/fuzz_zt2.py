"""Fuzzes the reader of zTensor's container version 2: any manifest and blobs open, list and decode, or end in an
IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_zt2 -max_total_time=600

An input is a manifest (its length first, 2 bytes) and what lies at byte 4096; frame, place and checksum are made right,
and the manifest deterministic where it is CBOR at all, so that what lies behind them is reached. The conformance corpus
is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_zt2 crash-...``.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import atheris

from ingot.artifacts.open import with_decoders
from ingot.core.bytes import checksums
from ingot.core.parsing import cbor
from ingot.errors import IngotError
from ingot.formats.zt2.format import Zt2Format
from ingot.formats.zt2.layout import ALIGNMENT, FOOTER, MAGIC, Footer, align
from ingot.stores.memory import MemoryStore

CORPUS = Path(__file__).parent.parent / "golden" / "zt2" / "conformance.zip"


def framed(manifest: bytes, blobs: bytes) -> bytes:
    """Return a file with this manifest and these bytes from 4096 on."""
    data = MAGIC.ljust(ALIGNMENT, b"\0") + blobs
    start = align(len(data), ALIGNMENT)
    return data.ljust(start, b"\0") + manifest + Footer(start, len(manifest), checksums.xxh3(manifest)).pack()


def deterministic(manifest: bytes) -> bytes:
    """Return a manifest in the one encoding that is read; what is no CBOR as it is."""
    try:
        return cbor.dumps(cbor.loads(manifest), sort=True)
    except IngotError:
        return manifest


def one_input(data: bytes) -> None:
    """Read an input as a file, and decode what it holds: no tensor is larger than its bytes allow."""
    size = int.from_bytes(data[:2], "little")
    try:
        store = MemoryStore({"x.zt": framed(deterministic(data[2 : 2 + size]), data[2 + size :])})
        tensors = with_decoders(Zt2Format().read(store, "x.zt").tensors)
        for name in tensors:
            tensors[name].numpy()
    except IngotError:
        return


def main() -> None:
    """Run atheris over the manifests and blobs of the corpus."""
    with tempfile.TemporaryDirectory() as seeds, zipfile.ZipFile(CORPUS) as archive:
        for number, name in enumerate(archive.namelist()):
            whole = archive.read(name)
            footer = Footer.unpack(whole[-FOOTER:].rjust(FOOTER, b"\0"))
            manifest = whole[footer.offset : footer.offset + footer.length]
            if len(manifest) < 1 << 16:
                seed = len(manifest).to_bytes(2, "little") + manifest + whole[ALIGNMENT : footer.offset]
                (Path(seeds) / str(number)).write_bytes(seed)
        atheris.instrument_all()
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
