"""Both ways with the package ztensor 1.2.3: its files read here, ours read there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ztensor

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import LARGE
from ingot.core.bytes.encodings import FRAME, compress_frame
from ingot.core.numeric.dtypes import STORAGE_DTYPES, numpy_dtype
from ingot.errors import IntegrityError
from ingot.formats.base import Catalog
from ingot.formats.zt.format import ZtFormat
from ingot.formats.zt.writer import ZtWriter
from ingot.model.layouts.base import file_id
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.local import LocalStore, LocalTarget
from ingot.testing.formats import Item, feed

RNG = np.random.default_rng(20240501)
LOGICAL = ("f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    return (RNG.standard_normal(shape) * 50).astype(np.float32).astype(kind)


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Any]:
    opened: list[Catalog] = []

    def run() -> Catalog:
        opened.append(ZtFormat().read(LocalStore(tmp_path), "m.zt"))
        return opened[-1]

    yield run
    for catalog in opened:
        for source in catalog.sources:
            source.close()


def theirs(tmp_path: Path) -> str:
    return str(tmp_path / "m.zt")


@pytest.mark.parametrize("compress", [None, True, 7])
@pytest.mark.parametrize("checksum", ["none", "crc32c", "sha256"])
def test_their_dense_files_of_every_dtype(tmp_path: Path, read: Any, compress: Any, checksum: str) -> None:
    arrays = {name: values(name, (5, 7)) for name in STORAGE_DTYPES}
    arrays |= {
        "scalar": np.array(2.5),
        "nothing": np.zeros((0, 3), np.int64),
        "": values("u8", (3,)),
        "a\nb": values("i8", (2,)),
    }
    with ztensor.Writer(theirs(tmp_path)) as writer:
        for name, array in arrays.items():
            writer.write_numpy(name, array, compress=compress, checksum=checksum)
    found = read()
    assert sorted(found.tensors) == sorted(arrays)
    for name, array in arrays.items():
        tensor, part = found.tensors[name], found.tensors[name].parts["data"]
        assert tensor.shape == (array.shape or (1,))
        assert numpy_dtype(tensor.dtype) == array.dtype
        assert part.encoding == ("zstd" if compress else "raw")
        assert (part.digest or "none").partition(":")[0] == checksum
        assert bytes(part.view()) == array.tobytes()
        if part.digest is not None:  # our spelling is theirs
            assert part.digest == checksums.digest(checksum, part.stored())


@pytest.mark.parametrize("type_", LOGICAL)
def test_their_logical_types(tmp_path: Path, read: Any, type_: str) -> None:
    raw = RNG.integers(0, 256, (4, 3), np.uint8)
    with ztensor.Writer(theirs(tmp_path)) as writer:
        writer.write("t", ztensor.Tensor({"data": raw}, type=type_))
        writer.write("odd", ztensor.Tensor({"data": raw}, type="posit8"))
        pairs = np.arange(6, dtype=np.float32)
        writer.write("c", ztensor.Tensor({"data": pairs}, shape=[3], type="complex64"))
    found = read().tensors
    assert found["t"].dtype == type_
    assert found["odd"].dtype == "posit8"
    assert found["c"].dtype == "complex64"
    assert bytes(found["t"].parts["data"].view()) == raw.tobytes()
    np.testing.assert_array_equal(found["c"].parts["data"].array(), pairs)


ATTRIBUTES = {
    "bits": 4,
    "group_size": 128,
    "packing": "8_per_i32",
    "ratio": 0.25,
    "list": [1, None, True, "x"],
    "raw": b"\0\1",
}


def composite() -> dict[str, tuple[dict[str, np.ndarray[Any, Any]], list[int], str]]:
    return {
        "csr": (
            {
                "values": values("bf16", (4,)),
                "indices": np.array([0, 2, 1, 2], np.uint64),
                "indptr": np.array([0, 2, 2, 4], np.uint64),
            },
            [3, 3],
            "sparse_csr",
        ),
        "coo": (
            {"values": values("f32", (2,)), "coords": np.array([0, 2, 1, 1, 3, 0], np.uint64)},
            [3, 2, 4],
            "sparse_coo",
        ),
        "group": (
            {
                "packed_weight": RNG.integers(-(2**31), 2**31, 64).astype(np.int32),
                "scales": values("f16", (4,)),
                "zeros": values("f16", (4,)),
            },
            [4, 128],
            "quantized_group",
        ),
        "other": ({"blob": values("u16", (3,))}, [9, 9], "my_own_layout"),
    }


@pytest.mark.parametrize("compress", [None, True])
def test_their_composite_tensors(tmp_path: Path, read: Any, compress: Any) -> None:
    with ztensor.Writer(theirs(tmp_path)) as writer:
        for name, (parts, shape, format_) in composite_items():
            tensor = ztensor.Tensor(parts, shape=shape, format=format_, attributes=ATTRIBUTES)
            writer.write(name, tensor, compress=compress, checksum="crc32c")
    found = read().tensors
    for name, (parts, shape, format_) in composite_items():
        tensor = found[name]
        assert (list(tensor.shape), file_id(tensor.codec), dict(tensor.params)) == (shape, format_, ATTRIBUTES)
        assert sorted(tensor.parts) == sorted(parts)
        for role, array in parts.items():
            np.testing.assert_array_equal(tensor.parts[role].array(), array)
            assert tensor.parts[role].array().dtype == array.dtype


COMPOSITE = composite()


def composite_items() -> list[tuple[str, tuple[dict[str, np.ndarray[Any, Any]], list[int], str]]]:
    return list(COMPOSITE.items())


def test_their_appended_replaced_and_shrunk_files(tmp_path: Path, read: Any) -> None:
    first = {name: values("f32", (3, 3)) for name in "abc"}
    with ztensor.Writer(theirs(tmp_path)) as writer:
        for name, array in first.items():
            writer.add(name, array, checksum="crc32c")
    with ztensor.Writer.append(theirs(tmp_path)) as writer:
        writer.add("d", np.arange(5), compress=True, checksum="sha256")
    assert sorted(read().tensors) == ["a", "b", "c", "d"]
    ztensor.remove_tensors(theirs(tmp_path), str(tmp_path / "less.zt"), ["b"])
    ztensor.replace_tensor(str(tmp_path / "less.zt"), "a", np.full((3, 3), 7, np.float32))
    found = ZtFormat().read(LocalStore(tmp_path), "less.zt")
    assert sorted(found.tensors) == ["a", "c", "d"]
    np.testing.assert_array_equal(found.tensors["d"].parts["data"].array(), np.arange(5))
    np.testing.assert_array_equal(found.tensors["a"].parts["data"].array(), np.full(9, 7, np.float32))
    for source in found.sources:
        source.close()


def write_ours(tmp_path: Path, tensors: list[tuple[TensorSpec, dict[str, bytes]]], **options: Any) -> ztensor.Reader:
    sink = LocalTarget(tmp_path).create("m.zt")
    with ZtWriter(sink, [spec for spec, _ in tensors], **options) as writer:
        for spec, parts in tensors:
            feed(writer, Item(spec, parts))
    return ztensor.Reader(theirs(tmp_path))


@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_our_dense_files_of_every_dtype(tmp_path: Path, digest: str | None, encoding: str) -> None:
    arrays = {name: values(name, (5, 7)) for name in STORAGE_DTYPES}
    arrays |= {"nothing": np.zeros((0, 3), np.float32), "": values("f16", (1,)), "a\nb": values("u8", (4,))}
    tensors = []
    for name, array in arrays.items():
        dtype = {"bool_": "bool"}.get(array.dtype.name, array.dtype.name)
        canonical = next(row.name for row in STORAGE_DTYPES.values() if row.numpy == dtype)
        stored = compress_frame(array.tobytes()) if encoding == "zstd" else array.tobytes()
        whole = array.nbytes if encoding == "zstd" else None
        part = PartSpec("data", canonical, len(stored), None, encoding, whole)
        tensors.append((TensorSpec(name, array.shape, canonical, "dense", (part,)), {"data": stored}))
    reader = write_ours(tmp_path, tensors, digest=digest)
    assert sorted(reader.keys()) == sorted(arrays)
    for name, array in arrays.items():
        back = reader.read_numpy(name)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()


def test_our_scalars_and_logical_types(tmp_path: Path) -> None:
    raw = RNG.integers(0, 256, 3, np.uint8)
    fp8 = PartSpec("data", "u8", 3, "f8_e4m3fn")
    reader = write_ours(
        tmp_path,
        [
            (TensorSpec("s", (), "f32", "dense", (PartSpec("data", "f32", 4),)), {"data": np.float32(2.5).tobytes()}),
            (TensorSpec("f8", (3,), "f8_e4m3fn", "dense", (fp8,)), {"data": raw.tobytes()}),
        ],
    )
    assert reader.read_numpy("s").tolist() == [2.5]
    assert reader.metadata("f8").type == "f8_e4m3fn"
    np.testing.assert_array_equal(reader.read("f8").components["data"], raw)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_our_composite_tensors(tmp_path: Path, encoding: str) -> None:
    tensors = []
    for name, (parts, shape, format_) in composite_items():
        specs, stored = [], {}
        for role, array in parts.items():
            dtype = next(row.name for row in STORAGE_DTYPES.values() if row.numpy == array.dtype.name)
            stored[role] = compress_frame(array.tobytes()) if encoding == "zstd" else array.tobytes()
            whole = array.nbytes if encoding == "zstd" else None
            specs.append(PartSpec(role, dtype, None if encoding == "zstd" else array.nbytes, None, encoding, whole))
        dtype = {"csr": "bf16", "coo": "f32", "group": "f16", "other": "u16"}[name]
        tensors.append((TensorSpec(name, tuple(shape), dtype, format_, tuple(specs), ATTRIBUTES), stored))
    reader = write_ours(tmp_path, tensors)
    for name, (parts, shape, format_) in composite_items():
        tensor = reader.read(name)
        assert (tensor.shape, tensor.format, tensor.attributes) == (shape, format_, ATTRIBUTES)
        for role, array in parts.items():
            np.testing.assert_array_equal(tensor.components[role], array)


def test_our_zstd_in_several_frames(tmp_path: Path) -> None:
    data = np.arange((FRAME * 2 + 12) // 4, dtype=np.uint32)
    raw = data.tobytes()
    frames = [compress_frame(raw[start : start + FRAME]) for start in range(0, len(raw), FRAME)]
    part = PartSpec("data", "u32", None, encoding="zstd", uncompressed_length=len(raw))
    reader = write_ours(tmp_path, [(TensorSpec("t", data.shape, "u32", "dense", (part,)), {"data": b"".join(frames)})])
    np.testing.assert_array_equal(reader.read_numpy("t"), data)


@pytest.mark.parametrize("digest", ["crc32c", "sha256"])
def test_their_reader_passes_over_digests_of_chunks(tmp_path: Path, read: Any, digest: str) -> None:
    data = np.random.default_rng(5).integers(0, 1 << 63, (LARGE // 8 + 5,), np.uint64)
    part = PartSpec("data", "u64", data.nbytes)
    spec = TensorSpec("t", data.shape, "u64", "dense", (part,))
    reader = write_ours(tmp_path, [(spec, {"data": data.tobytes()})], digest=digest)
    np.testing.assert_array_equal(reader.read_numpy("t"), data)
    assert read().tensors["t"].parts["data"].chunks is not None


def test_their_reader_checks_our_digests_and_ours_theirs(tmp_path: Path, read: Any) -> None:
    """Their mapped reader skips the digest of raw parts, so a compressed one is damaged."""
    array = np.zeros(1000, ml_dtypes.bfloat16)
    for ours in (True, False):
        path = Path(theirs(tmp_path))
        if ours:
            stored = compress_frame(array.tobytes())
            part = PartSpec("data", "bf16", len(stored), None, "zstd", array.nbytes)
            write_ours(tmp_path, [(TensorSpec("t", (1000,), "bf16", "dense", (part,)), {"data": stored})])
        else:
            with ztensor.Writer(str(path)) as writer:
                writer.add("t", array, compress=True, checksum="crc32c")
        data = bytearray(path.read_bytes())
        data[64 + 8] ^= 0x40
        path.write_bytes(data)
        with pytest.raises((RuntimeError, ValueError)):
            ztensor.Reader(str(path)).read("t")
        with pytest.raises(IntegrityError) as caught:
            read().tensors["t"].parts["data"].stored()
        assert caught.value.rule == "part.digest-mismatch"


@pytest.mark.parametrize("stem", ["foreign-indefinite", "foreign-tags", "foreign-undefined", "shared-blobs"])
def test_what_the_package_reads_of_others_is_read(tmp_path: Path, read: Any, stem: str) -> None:
    """Indefinite lengths, tags, undefined, and parts that share a blob."""
    path = Path(__file__).parent.parent / "golden" / "zt" / "valid" / f"{stem}.zt"
    (tmp_path / "m.zt").write_bytes(path.read_bytes())
    reader = ztensor.Reader(theirs(tmp_path))
    found = read().tensors
    assert sorted(reader.keys()) == sorted(found)
    for name, tensor in found.items():
        array = np.asarray(reader.read_numpy(name))
        assert array.shape == tensor.shape
        assert array.tobytes() == bytes(tensor.parts["data"].view())
