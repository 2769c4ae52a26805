"""Fuzzes the GGUF reader: any bytes open, list and decode, or end in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_gguf -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_gguf crash-...``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from ingot.artifacts.open import with_decoders
from ingot.errors import IngotError
from ingot.formats.gguf.format import GgufFormat
from ingot.stores.memory import MemoryStore

CORPUS = Path(__file__).parent.parent / "golden" / "gguf"


def one_input(data: bytes) -> None:
    """Read an input as a file, and decode what it holds: no tensor is larger than its bytes allow."""
    try:
        catalog = GgufFormat().read(MemoryStore({"x.gguf": data}), "x.gguf")
        tensors = with_decoders(catalog.tensors)
        for name in tensors:
            tensors[name].numpy()
    except IngotError:
        return


def main() -> None:
    """Run atheris over copies of the golden files."""
    with tempfile.TemporaryDirectory() as seeds:
        for number, path in enumerate(sorted(CORPUS.rglob("*.gguf"))):
            (Path(seeds) / str(number)).write_bytes(path.read_bytes())
        atheris.instrument_all()
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
