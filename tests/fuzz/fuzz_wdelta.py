"""Fuzzes the .wdelta reader: any bytes open, list and decode, or end in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_wdelta -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_wdelta crash-...``. By its first byte an input is a file, a header with the records of a
good file behind it, or a series of choices that make a well-typed file.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris

from ingot.codecs.table import CODECS
from ingot.errors import IngotError
from ingot.formats.wdelta.digest import check_digest
from ingot.formats.wdelta.reader import read_catalog
from ingot.model.bytesource import MemorySource
from tests.support.wdelta import Made, Record, int4, quantized, sparse, wdelta_file

CORPUS = Path(__file__).parent.parent / "golden" / "wdelta"
GOOD = int4(quantized(sparse(Made(), "s"), "q"), "i")
DTYPES = [
    "float32",
    "float16",
    "uint8",
    "int64",
    "int32",
    "bfloat16",
    "<f4",
    "object",
    "float64",
    ">f4",
    "uint32",
    "int16",
]
SIZES = [0, 1, 2, 3, 12, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]
# Shapes that claim more are listed but not decoded: a few stored values may stand for any size.
MAX_DECODED = 1 << 20


def read_all(data: bytes) -> None:
    """Open, list, and decode every tensor whole and by rows; compare the digest."""
    source = MemorySource(data, "fuzz")
    catalog = read_catalog(source, "fuzz")
    for tensor in catalog.tensors.values():
        repr(tensor)
        if tensor.size <= MAX_DECODED:
            attempt(lambda tensor=tensor: CODECS[tensor.codec].decode(tensor, "f32"))
            attempt(lambda tensor=tensor: CODECS[tensor.codec].decode(tensor, "bf16"))
    attempt(lambda: check_digest(source))


def attempt(call: Any) -> None:
    """Call; an error must be one of Ingot's."""
    try:
        call()
    except IngotError as error:
        check(error)


def check(error: IngotError) -> None:
    """An error names its rule and is one line."""
    if not error.rule or "\n" in str(error):
        raise AssertionError(f"an error without a rule, or of several lines: {error!r}")


def test_one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    kind = data[:1]
    if kind < b"\x50":
        file = wdelta_file(data[1:], GOOD.records, version=2)
    elif kind < b"\xa0":
        file = chosen(atheris.FuzzedDataProvider(data[1:]))
    else:
        file = data[1:]
    attempt(lambda: read_all(file))


def chosen(data: atheris.FuzzedDataProvider) -> bytes:
    """A file whose fields have the right types and often the right values."""
    made = Made()
    for name in ("a", "b")[: data.ConsumeIntInRange(1, 2)]:
        add = data.PickValueInList([sparse, quantized, int4])
        add(made, name)
        entry = made.tensors[name]
        if data.ConsumeBool():
            entry["shape"] = [data.ConsumeIntInRange(0, 20) for _ in range(data.ConsumeIntInRange(0, 3))]
        for key in ("n_elements", "n_cols", "n_outliers", "int4_layout"):
            if data.ConsumeBool():
                entry[key] = data.PickValueInList([*SIZES, -1])
    for index, record in enumerate(made.records):
        if data.ConsumeProbability() < 0.2:
            made.records[index] = Record(
                record.tensor,
                record.field,
                data.PickValueInList(DTYPES),
                data.ConsumeBytes(data.ConsumeIntInRange(0, 40)),
                data.PickValueInList([None, [], [1, 1], *([size] for size in SIZES)]),
                data.PickValueInList([None, *SIZES]),
            )
    return made.file(data.PickValueInList([1, 2]))


def instrument() -> None:
    """Let the fuzzer see which branches run; see ``fuzz_zt.instrument``."""
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        if (function.__module__ or "").startswith("ingot."):
            atheris.instrument_func(function)


def seeds(folder: Path) -> None:
    """Write every golden file as it is, and its header alone."""
    for index, path in enumerate(sorted(CORPUS.rglob("*.wdelta"))):
        data = path.read_bytes()
        (folder / f"{index}-file").write_bytes(b"\xff" + data)
        (folder / f"{index}-header").write_bytes(b"\x00" + data[15 : 15 + int.from_bytes(data[11:15], "little")])


def main() -> None:
    instrument()
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), "-max_len=65536"], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
