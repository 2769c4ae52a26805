"""A writer and a reader of ``.zt`` made from the zTensor document alone: cbor2, zstandard, NumPy, nothing of Ingot's.

What the writer makes opens in Ingot with the same values, and the reader takes what Ingot writes.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
from pathlib import Path
from typing import Any

import cbor2
import ml_dtypes
import numpy as np
import pytest
import zstandard

import ingot

Array = np.ndarray[Any, Any]
MAGIC = b"ZTEN1000"
PRIMITIVES = {name: np.dtype(code) for name, code in {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bool": "?"}.items()}
PRIMITIVES |= {f"{kind}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}
PRIMITIVES |= {"bf16": np.dtype(ml_dtypes.bfloat16)}
FP8 = {
    "f8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (4, 5), (2, 3, 4, 5)]


class Writer:
    """Sections 1 and 4: blobs at multiples of 64 one after the other, then the manifest."""

    def __init__(self) -> None:
        self.file = bytearray(MAGIC)
        self.objects: dict[str, Any] = {}

    def blob(
        self, array: Array, *, zstd: bool = False, digest: bool = False, type: str | None = None
    ) -> dict[str, Any]:
        dtype = next(name for name, kind in PRIMITIVES.items() if kind == array.dtype)
        raw = array.tobytes()
        stored = zstandard.compress(raw) if zstd else raw
        self.file += bytes(-len(self.file) % 64)
        entry: dict[str, Any] = {"dtype": dtype, "offset": len(self.file), "length": len(stored)}
        if zstd:
            entry |= {"encoding": "zstd", "uncompressed_length": len(raw)}
        if digest:
            entry["digest"] = "sha256:" + hashlib.sha256(stored).hexdigest()
        if type:
            entry["type"] = type
        self.file += stored
        return entry

    def dense(self, name: str, array: Array, shape: tuple[int, ...] | None = None, **how: Any) -> None:
        entry = {"shape": list(array.shape if shape is None else shape), "format": "dense"}
        self.objects[name] = {**entry, "components": {"data": self.blob(array, **how)}}

    def save(self, path: Path, attributes: dict[str, Any] | None = None) -> Path:
        root: dict[str, Any] = {"version": "1.2.0", "objects": self.objects}
        if attributes:
            root["attributes"] = attributes
        manifest = cbor2.dumps(root)
        path.write_bytes(self.file + manifest + struct.pack("<Q", len(manifest)) + MAGIC)
        return path


class Reader:
    """Section 5, step by step."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        (size,) = struct.unpack("<Q", self.data[-16:-8])
        assert self.data[-8:] == self.data[:8] == MAGIC
        assert size <= 10**9
        root = cbor2.loads(self.data[-16 - size : -16])
        assert root["version"].startswith("1.")
        self.objects, self.attributes = root["objects"], root.get("attributes", {})

    def component(self, name: str, role: str) -> Array:
        about = self.objects[name]["components"][role]
        assert about["offset"] % 64 == 0
        raw = self.data[about["offset"] : about["offset"] + about["length"]]
        assert len(raw) == about["length"]
        if about.get("encoding", "raw") == "zstd":
            raw = zstandard.decompress(raw, max_output_size=about["uncompressed_length"])
        return np.frombuffer(raw, PRIMITIVES[about["dtype"]])

    def dense(self, name: str) -> Array:
        assert self.objects[name]["format"] == "dense"
        found, kind = self.component(name, "data"), self.objects[name]["components"]["data"].get("type")
        if kind in FP8:
            found = found.view(FP8[kind])
        elif kind and kind.startswith("complex"):
            found = found.view(kind)
        return found.reshape(self.objects[name]["shape"])


def same(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def arrays() -> dict[str, Array]:
    rng = np.random.default_rng(4)
    found: dict[str, Array] = {}
    for dtype, kind in PRIMITIVES.items():
        for shape in SHAPES:
            values = rng.integers(0, 2 if dtype == "bool" else 100, shape)
            found[f"{dtype}.{'x'.join(map(str, shape))}"] = np.asarray(values).astype(kind)
    names = ["", "a/b", "..", "layer1.weight", "ключ", "重み 0", "x" * 300, "with\nline"]
    return found | {name: np.float32([len(name)]) for name in names}


@pytest.mark.parametrize("how", [{}, {"zstd": True}, {"digest": True}, {"zstd": True, "digest": True}])
def test_its_dense_files_are_read(how: dict[str, bool], tmp_path: Path) -> None:
    """All 13 primitives, every shape, any names, attributes of the file, digests of the stored bytes."""
    writer = Writer()
    for name, array in arrays().items():
        writer.dense(name, array, **how)
    path = writer.save(tmp_path / "m.zt", {"framework": "PyTorch", "license": "Apache-2.0"})
    with ingot.open(path) as checkpoint:
        assert checkpoint.metadata == {"framework": "PyTorch", "license": "Apache-2.0"}
        assert set(checkpoint) == set(arrays())
        for name, array in arrays().items():
            same(checkpoint[name].numpy(), array)
    assert not [item for item in ingot.verify(path, strict=True) if item.level == "error"]


@pytest.mark.parametrize("how", [{}, {"zstd": True}])
def test_its_logical_types_are_read(how: dict[str, bool], tmp_path: Path) -> None:
    """Section 2: four 8-bit floats of one ``u8`` each, complex numbers of two elements, the real one first."""
    writer = Writer()
    expected = {name: np.arange(0, 100, 4, np.uint8).reshape(5, 5).view(kind) for name, kind in FP8.items()}
    for name, array in expected.items():
        writer.dense(name, array.view(np.uint8), type=name, **how)
    for name in ("complex64", "complex128"):
        expected[name] = np.array([[1 + 2j, -3.5j], [0, 1e-3]], name)
        parts = expected[name].view(np.float32 if name == "complex64" else np.float64)
        writer.dense(name, parts, (2, 2), type=name, **how)
    with ingot.open(writer.save(tmp_path / "m.zt")) as checkpoint:
        for name, array in expected.items():
            same(checkpoint[name].numpy(), array)


def test_its_sparse_matrices_are_read(tmp_path: Path) -> None:
    """Section 3: row pointers one longer than rows; coordinates by dimension, all rows first."""
    rng, writer = np.random.default_rng(5), Writer()
    dense = np.where(rng.random((6, 9)) < 0.3, rng.standard_normal((6, 9)), 0).astype(np.float32)
    rows, columns = np.nonzero(dense)
    pointers = np.searchsorted(rows, np.arange(7)).astype(np.uint64)
    indices = {"indices": columns.astype(np.uint64), "indptr": pointers}
    coords = {"coords": np.concatenate([rows, columns]).astype(np.uint64)}
    for name, parts in (("sparse_csr", indices), ("sparse_coo", coords)):
        components = {"values": writer.blob(dense[rows, columns])}
        components |= {role: writer.blob(array) for role, array in parts.items()}
        writer.objects[name] = {"shape": [6, 9], "format": name, "components": components}
    with ingot.open(writer.save(tmp_path / "m.zt")) as checkpoint:
        for name in ("sparse_csr", "sparse_coo"):
            same(checkpoint[name].numpy(), dense)


def test_the_example_of_quantized_groups_is_read(tmp_path: Path) -> None:
    """Section 3's example to the byte: 4096 x 4096 in 4 bits and groups of 128, blobs of 8388608, 262144 and 262144
    bytes at 1024, 8389632 and 8651776."""
    rng, writer = np.random.default_rng(6), Writer()
    words = rng.integers(-(2**31), 2**31, (4096, 512)).astype(np.int32)
    scales = rng.uniform(0.5, 2, (4096, 32)).astype(np.float16)
    zeros = rng.integers(0, 16, (4096, 32)).astype(np.float16)
    writer.file += bytes(1024 - len(writer.file))
    components = {"packed_weight": writer.blob(words), "scales": writer.blob(scales), "zeros": writer.blob(zeros)}
    assert [(part["offset"], part["length"]) for part in components.values()] == [
        (1024, 8388608),
        (8389632, 262144),
        (8651776, 262144),
    ]
    attributes = {"bits": 4, "group_size": 128, "packing": "8_per_i32"}
    about = {"shape": [4096, 4096], "format": "quantized_group", "attributes": attributes, "components": components}
    writer.objects["w"] = about
    with ingot.open(writer.save(tmp_path / "m.zt")) as checkpoint:
        found = np.concatenate([checkpoint["w"][row : row + 1] for row in range(0, 4096, 512)])
    codes = (words.view(np.uint32)[::512, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(8, 32, 128)
    expected = scales[::512, :, None].astype(np.float32) * (codes - zeros[::512, :, None].astype(np.float32))
    assert np.array_equal(found, expected.reshape(8, 4096).astype(np.float16))


@pytest.mark.parametrize("zstd", [False, True])
def test_its_reader_takes_what_ingot_writes(zstd: bool, tmp_path: Path) -> None:
    """Arrays saved, and a file of the writer converted."""
    expected = dict(list(arrays().items())[:: 5 if zstd else 1])
    if zstd:
        writer = Writer()
        for name, array in expected.items():
            writer.dense(name, array, zstd=True)
        ingot.convert(writer.save(tmp_path / "theirs.zt", {"framework": "PyTorch"}), tmp_path / "m.zt")
    else:
        expected |= {name: np.arange(64, dtype=np.uint8).view(kind) for name, kind in FP8.items()}
        expected["complex64"] = np.array([1 + 2j, -3j], np.complex64)
        ingot.save(tmp_path / "m.zt", expected, metadata={"framework": "PyTorch"})
    reader = Reader(tmp_path / "m.zt")
    assert reader.attributes["framework"] == "PyTorch"
    assert set(reader.objects) == set(expected)
    for name, array in expected.items():
        same(reader.dense(name), array)


def test_a_minimal_reader_is_a_few_dozen_lines() -> None:
    """The document's design goals; this one has dense objects in every type."""
    assert len(inspect.getsource(Reader).splitlines()) <= 36
