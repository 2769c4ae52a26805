"""Fuzzes the reader of kernel units: any bytes open and decode, or end in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_anek -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_anek crash-...``. Digests are made to fit, so that what lies behind them is reached.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from ingot.artifacts.open import with_decoders
from ingot.errors import IngotError
from ingot.ext.ane.kernel_units.format import AnekFormat
from ingot.ext.ane.kernel_units.header import HEADER, seal
from ingot.ext.ane.kernel_units.index import INDEX
from ingot.stores.memory import MemoryStore

CORPUS = Path(__file__).parent.parent / "golden" / "anek"
# Shapes that claim more are listed but not decoded: an identity may stand for any size.
MAX_DECODED = 1 << 20


def one_input(data: bytes) -> None:
    """Read an input as a unit, or as an index beside a unit where it begins as an object does."""
    files = {"x.anek": data}
    if data[:1] == b"{":
        files = {INDEX: data, "a.q.weight.anek": (CORPUS / "palette4.anek").read_bytes()}
    elif len(data) >= HEADER:
        unit = bytearray(data)
        seal(unit)
        files["x.anek"] = bytes(unit)
    try:
        catalog = AnekFormat().read(MemoryStore(files), next(iter(files)), verify=False)
        tensors = with_decoders(catalog.tensors)
        for name in tensors:
            if tensors[name].size <= MAX_DECODED:
                tensors[name].numpy()
        if catalog.check_whole is not None:
            catalog.check_whole()
    except IngotError:
        return


def main() -> None:
    """Run atheris over copies of the golden files."""
    with tempfile.TemporaryDirectory() as seeds:
        for path in (*CORPUS.glob("*.anek"), CORPUS / "model" / INDEX):
            (Path(seeds) / path.name).write_bytes(path.read_bytes())
        atheris.instrument_all()
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
