"""Fuzzes the .zt reader: any bytes open, list and decode, or end in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_zt -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_zt crash-...``. By its first byte an input is a file, a manifest with blobs around it, or
a series of choices that make a well-typed manifest: the first two test the parser, the third the rules behind it.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from random import Random
from types import FunctionType
from typing import Any

import atheris

from ingot.core.parsing import cbor
from ingot.errors import IngotError
from ingot.formats.zt.reader import read_catalog
from ingot.model.bytesource import MemorySource
from tests.support.zt import loose_cbor, zstd_frame, zt_file

CORPUS = Path(__file__).parent.parent / "golden" / "zt"
FRAME = zstd_frame(bytes(range(64)))
BLOBS = {64: bytes(range(256)), 320: FRAME, 448: FRAME + FRAME}
CODECS = [
    ("dense", ["data"]),
    ("sparse_csr", ["values", "indices", "indptr"]),
    ("sparse_coo", ["values", "coords"]),
    ("quantized_group", ["packed_weight", "scales", "zeros"]),
    ("other", ["a", "b"]),
]
DTYPES = ["f32", "f64", "bf16", "u64", "u8", "bool", "f9"]
FIELDS: dict[str, list[Any]] = {
    "type": ["f8_e5m2", "complex64", "f4_e2m1fn", "f32", "odd", None],
    "offset": [64, 320, 448, 2**62, 1],
    "length": [len(FRAME), 2 * len(FRAME), 64, 16, 0, 2**62],
    "encoding": ["zstd", "zstd", "raw", "lz4"],
    "uncompressed_length": [64, 128, 63, 0, 2**40, None],
    "digest": ["crc32c:0x00000000", "sha256:" + "0" * 64, "crc32c:", "md5:00", None],
}
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
    kind = data[:1]
    if kind < b"\x50":
        file = zt_file(data[1:], BLOBS)
    elif kind < b"\xa0":
        choices = atheris.FuzzedDataProvider(data[1:])
        rng = Random(choices.ConsumeInt(4)) if choices.ConsumeBool() else None
        manifest = chosen(choices)
        file = zt_file(loose_cbor(manifest, rng) if rng else manifest, BLOBS)
    else:
        file = data[1:]
    try:
        read_all(file)
    except IngotError as error:
        check(error)


def chosen(data: atheris.FuzzedDataProvider) -> dict[str, Any]:
    """A manifest whose fields have the right types and often the right values."""
    objects = {}
    for name in range(data.ConsumeIntInRange(1, 3)):
        codec, roles = data.PickValueInList(CODECS)
        components = {}
        for role in roles:
            part = {"dtype": data.PickValueInList(DTYPES)}
            for field, values in FIELDS.items():
                if data.ConsumeBool():
                    part[field] = data.PickValueInList(values)
            part.setdefault("offset", data.ConsumeIntInRange(0, 8) * 64)
            part.setdefault("length", data.ConsumeIntInRange(0, 80))
            components[role] = part
        shape = [data.ConsumeIntInRange(0, 20) for _ in range(data.ConsumeIntInRange(0, 3))]
        objects[str(name)] = {"shape": shape, "format": codec, "components": components}
    return {"version": "1.2.0", "objects": objects}


def instrument() -> None:
    """Let the fuzzer see which branches run.

    ``atheris.instrument_imports`` sees nothing through the import hook of an editable install, so functions are taken
    one by one.
    """
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        if (function.__module__ or "").startswith("ingot."):
            atheris.instrument_func(function)


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
    instrument()
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), "-max_len=65536"], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
