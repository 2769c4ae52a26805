"""Fuzzes statistics of models: safetensors as ``ingot calibrate`` writes them, importance matrices of llama.cpp.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_statistics -max_total_time=600

Any bytes are statistics whose arrays can be read, or end in an IngotError. Findings are written to the current folder
as crash-*; ``python -m tests.fuzz.fuzz_statistics crash-...`` replays one. By its first byte an input is a file as it
is, or a series of choices that change entries, shapes, types and metadata of a well-formed file.
"""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import atheris
import numpy as np

import ingot
from ingot.core.numeric.dtypes import BY_SAFETENSORS
from ingot.errors import IngotError
from ingot.model.statistics import FIELDS, Statistics
from ingot.stores.memory import shared_files
from tests.fuzz.common import VALUES, change_value, fuzz
from tests.support.reading import checked

NAMES = ["model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", "blk.0.ffn_up_exps.weight", "w:expert.1", "w"]
SHAPES = [[64], [64, 64], [32, 64], [1], [0], [], [2, 64], [2**40], [2**31, 2**31], [64, 64, 2]]


def safetensors(header: Any, data: bytes) -> bytes:
    """Return a file of a header and bytes."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def statistics() -> tuple[dict[str, Any], bytes]:
    """Return the header and the bytes of a file that is right."""
    header: dict[str, Any] = {
        "__metadata__": {"ingot.statistics": "1", "model": "0" * 64, "w:same": NAMES[0], "samples": "3"}
    }
    data = bytearray()
    for name in (NAMES[0], "w"):
        for field, shape in zip(FIELDS, ([64, 64], [32, 32], [64], [64], [64], [1]), strict=True):
            if name == "w" and field == "inputs":
                continue
            dtype = "I64" if field == "count" else "F32"
            values = np.ones(shape, np.int64 if field == "count" else np.float32)
            header[f"{name}:{field}"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [len(data), len(data) + values.nbytes],
            }
            data += values.tobytes()
    return header, bytes(data)


HEADER, DATA = statistics()
CHOICES = [*VALUES, *SHAPES, *sorted(BY_SAFETENSORS), "1", "2", *NAMES]


def legacy(data: atheris.FuzzedDataProvider) -> bytes:
    """Return an importance matrix in llama.cpp's older form, in which a few things are others."""
    count = data.ConsumeIntInRange(0, 3)
    made = bytearray(struct.pack("<i", data.PickValueInList([count, count, count, -1, 2**31 - 1])))
    for _ in range(count):
        name = data.PickValueInList(NAMES).encode()
        size = data.PickValueInList([64, 64, 64, 0, -1, 2**30])
        made += struct.pack("<i", data.PickValueInList([len(name), len(name), len(name), -1, 2**31 - 1])) + name
        made += struct.pack("<ii", data.PickValueInList([1, 5, 0, -3]), size)
        made += np.full(64, data.PickValueInList([1.0, 0.0, -1.0, float("nan"), float("inf")]), np.float32).tobytes()
    made += struct.pack("<i", 7) + struct.pack("<i", 4) + b"text" if data.ConsumeBool() else b""
    return bytes(made)


def chosen(data: atheris.FuzzedDataProvider) -> bytes:
    """Return a file in which a few things are others."""
    if not data.ConsumeIntInRange(0, 3):
        return legacy(data)
    header = json.loads(json.dumps(HEADER))
    for _ in range(data.ConsumeIntInRange(1, 4)):
        change_value(data, header, CHOICES)
    values = bytearray(DATA)
    if data.ConsumeBool():
        place = data.ConsumeIntInRange(0, len(values) // 4 - 1) * 4
        values[place : place + 4] = data.PickValueInList([b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\xff\xff"])
    return safetensors(header, bytes(values))


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    raw = data[1:] if data[:1] >= b"\xc0" else chosen(atheris.FuzzedDataProvider(data[1:]))
    shared_files("fuzz")["s"] = bytearray(raw)
    try:
        with Statistics.open("memory:fuzz/s") as found:
            for name in found.names:
                read(found, name)
    except IngotError as error:
        checked(error)


def read(found: Statistics, name: str) -> None:
    """Read all that is known of one matrix."""
    matrix = found.for_matrix(name)
    if matrix is None:
        raise AssertionError(f"expected statistics of {name!r}")
    for field in ("rows", "cols", "diagonal", "inputs", "outputs", "absmax", "means"):
        try:
            getattr(matrix, field)
        except IngotError as error:
            checked(error)
    matrix.require_shape(32, 64)


def seeds() -> list[bytes]:
    """Return files that are right: of Ingot's, and importance matrices in both forms."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.gguf"
        values = {"blk.0.ffn_up.weight.in_sum2": np.ones((1, 64), np.float32)}
        values["blk.0.ffn_up.weight.counts"] = np.ones((1, 1), np.float32)
        ingot.save(path, values, {"general.type": "imatrix", "imatrix.chunk_count": 1, "imatrix.chunk_size": 512})
        return [b"\xff" + safetensors(HEADER, DATA), b"\xff" + path.read_bytes()]


if __name__ == "__main__":
    fuzz(one_input, seeds(), 65536)
