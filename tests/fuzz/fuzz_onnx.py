"""Fuzzes the ONNX reader: any bytes open, list and decode, or end in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_onnx -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_onnx crash-...``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from ingot.artifacts.open import with_decoders
from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.onnx.format import OnnxFormat
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments
from ingot.model.spec import TensorSpec
from ingot.stores.memory import MemoryStore

CORPUS = Path(__file__).parent.parent / "golden" / "onnx"


def one_input(data: bytes) -> None:
    """Read an input as a file, and decode what it holds: no tensor is larger than its bytes allow."""
    try:
        catalog = OnnxFormat().read(MemoryStore({"x.onnx": data, "w.bin": bytes(8)}), "x.onnx")
        tensors = with_decoders(catalog.tensors)
        for name in tensors:
            tensors[name].numpy()
        kept(catalog.attachments, [tensor.spec() for tensor in tensors.values()])
    except IngotError:
        return


def kept(attachments: Attachments, specs: list[TensorSpec]) -> None:
    """Plan to write the graph as it is: what opens can be written."""
    OnnxFormat().size(Artifact(specs, attachments=attachments), WriteOptions())


def main() -> None:
    """Run atheris over copies of the golden files."""
    with tempfile.TemporaryDirectory() as seeds:
        for number, path in enumerate(sorted(CORPUS.rglob("*.onnx"))):
            (Path(seeds) / str(number)).write_bytes(path.read_bytes())
        atheris.instrument_all()
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
