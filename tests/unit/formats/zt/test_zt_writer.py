"""Writing .zt: layout, streaming in any order, records for resuming, misuse."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest

from ingot.core.bytes import checksums
from ingot.core.bytes.encodings import bound, compress_frame
from ingot.errors import FormatError, ResourceError, UnsupportedError, UsageError
from ingot.formats.base import Catalog, WriteOptions
from ingot.formats.zt.format import ZtFormat
from ingot.formats.zt.writer import ZtWriter
from ingot.model.artifact import Artifact
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.local import LocalStore, LocalTarget
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import Item, feed

F32 = np.arange(4, dtype="<f4").tobytes()
Spec = Callable[..., TensorSpec]
Write = Callable[..., bytes]
Read = Callable[..., Catalog]


def manifest_of(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack("<Q", data[-16:-8])
    found: dict[str, Any] = cbor2.loads(data[-16 - size : -16])
    return found


def zstd_spec(name: str = "z", nbytes: int = 64) -> TensorSpec:
    parts = (
        PartSpec("packed_weight", "u8", None, encoding="zstd", uncompressed_length=nbytes),
        PartSpec("scales", "f16", 4),
        PartSpec("zeros", "f16", None, encoding="zstd", uncompressed_length=4),
    )
    return TensorSpec(name, (2, nbytes), "bf16", "affine", parts, {"bits": 4})


def test_a_file_byte_by_byte(spec: Spec, write: Write) -> None:
    data = write((spec("a"), {"data": F32}), (spec("b", 1), {"data": F32[:4]}), metadata={"k": "v"})
    assert data[:8] == data[-8:] == b"ZTEN1000"
    assert data[8:64] == bytes(56)
    assert data[64:80] == F32
    assert data[80:128] == bytes(48)
    assert data[128:132] == F32[:4]
    (size,) = struct.unpack("<Q", data[-16:-8])
    assert 132 + size + 16 == len(data)
    found = manifest_of(data)
    assert list(found) == ["version", "attributes", "objects", "ingot_digest"]
    digest = found["ingot_digest"].encode()
    without = data[132:-16].replace(digest, b"crc32c:0x00000000")
    assert found["ingot_digest"] == checksums.digest("crc32c", without)
    assert found["version"] == "1.2.0"
    assert list(found["objects"]) == ["a", "b"]
    assert found["objects"]["a"] == {
        "shape": [4],
        "format": "dense",
        "components": {"data": {"dtype": "f32", "offset": 64, "length": 16, "digest": checksums.digest("crc32c", F32)}},
    }


def test_no_tensors(write: Write, read: Read) -> None:
    data = write()
    root = {"version": "1.2.0", "objects": {}, "ingot_digest": "crc32c:0x00000000"}
    assert len(data) == 8 + len(cbor2.dumps(root)) + 16
    assert list(read(data).tensors) == []


@pytest.mark.parametrize(
    ("digest", "text"),
    [("crc32c", f"crc32c:0x{0x6BF4F6FD:08X}"), ("sha256", None), (None, None)],
)
def test_digests_are_spelled_as_the_package_spells_them(
    spec: Spec, write: Write, digest: str | None, text: str | None
) -> None:
    found = manifest_of(write((spec(), {"data": F32}), digest=digest))["objects"]["t"]["components"]["data"]
    if digest is None:
        assert "digest" not in found
    else:
        assert found["digest"] == checksums.digest(digest, F32)
        assert found["digest"].startswith({"crc32c": "crc32c:0x", "sha256": "sha256:"}[digest])
        value = found["digest"].removeprefix("crc32c:0x").removeprefix("sha256:")
        assert value == (value.upper() if digest == "crc32c" else value.lower())


def test_pieces_and_order_of_roles_do_not_change_the_file() -> None:
    spec = zstd_spec()
    stored = {"packed_weight": compress_frame(bytes(64)), "scales": b"abcd", "zeros": compress_frame(b"wxyz")}
    files = set()
    for order in itertools.permutations(stored):
        for step in (1, 5, 1000):
            target = MemoryTarget()
            writer = ZtWriter(target.create("f"), [spec])
            writer.begin(spec)
            pieces = {role: [stored[role][i : i + step] for i in range(0, len(stored[role]), step)] for role in order}
            for turn in itertools.zip_longest(*(pieces[role] for role in order)):
                for role, piece in zip(order, turn, strict=True):
                    if piece is not None:
                        writer.write(role, piece)
            writer.end()
            writer.finish()
            files.add(bytes(target.files["f"]))
    assert len(files) == 1
    found = manifest_of(files.pop())["objects"]["z"]["components"]
    assert list(found) == ["packed_weight", "scales", "zeros"]
    assert found["scales"]["offset"] < found["packed_weight"]["offset"] < found["zeros"]["offset"]


def test_a_large_spooled_part_comes_back(read: Read, write: Write) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8).tobytes()
    frame = compress_frame(noise)
    parts = (
        PartSpec("values", "u8", None),
        PartSpec("coords", "u64", None, encoding="zstd", uncompressed_length=8 * len(noise)),
        PartSpec("more", "u8", None, encoding="zstd", uncompressed_length=len(noise)),
    )
    spec = TensorSpec("t", (1 << 30,), "u8", "sparse_coo", parts)
    coords = compress_frame(bytes(8 * len(noise)))
    found = read(write((spec, {"more": frame, "coords": coords, "values": noise}))).tensors["t"]
    assert bytes(found.parts["more"].view()) == noise
    assert bytes(found.parts["values"].view()) == noise


def test_a_zstd_part_without_bytes_becomes_an_empty_frame(read: Read, write: Write) -> None:
    part = PartSpec("data", "f32", None, encoding="zstd", uncompressed_length=0)
    found = read(write((TensorSpec("t", (0, 3), "f32", "dense", (part,)), {}))).tensors["t"]
    assert found.parts["data"].length > 0
    assert bytes(found.parts["data"].view()) == b""


@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
def test_size_is_exact_before_a_byte_is_written(spec: Spec, write: Write, digest: str | None) -> None:
    tensors = [(spec(f"t{count}", count), {"data": bytes(4 * count)}) for count in (0, 1, 16, 17, 100_000, 0)[:5]]
    metadata = {"a": {"b": [1, 2.5]}}
    size = ZtFormat().size(Artifact([s for s, _ in tensors], metadata), WriteOptions(digest=digest))
    assert size == len(write(*tensors, metadata=metadata, digest=digest))


def test_size_counts_unknown_lengths_as_the_most_they_can_be() -> None:
    def size(length: int | None) -> int:
        part = PartSpec("data", "u8", length, encoding="zstd", uncompressed_length=1 << 20)
        return ZtFormat().size(Artifact([TensorSpec("t", (1 << 20,), "u8", "dense", (part,))]), WriteOptions())

    assert size(None) == size(bound(1 << 20)) > 1 << 20


def test_records_restore_to_the_same_file(tmp_path: Path, spec: Spec) -> None:
    first, second, third = spec("a"), zstd_spec(), spec("c", 33)
    z = {"packed_weight": compress_frame(bytes(64)), "scales": b"abcd", "zeros": compress_frame(b"wxyz")}
    work = [(first, {"data": F32}), (second, z), (third, {"data": bytes(132)})]
    specs = [item for item, _ in work]
    for digest in ("crc32c", "sha256", None):
        whole = MemoryTarget()
        with ZtWriter(whole.create("f"), specs, digest=digest, name="f") as writer:
            records = [json.loads(json.dumps(feed(writer, Item(*item)))) for item in work]
        for done in range(4):
            target = MemoryTarget()
            end = max((b[1] + b[2] for record in records[:done] for b in record["blobs"]), default=0)
            target.files["f"] = bytearray(whole.files["f"][:end]) + b"\xee" * 5000  # what a killed run left
            with ZtWriter(target.create("f"), specs, digest=digest, name="f") as writer:
                for record in records[:done]:
                    writer.restore(record)
                for item in work[done:]:
                    feed(writer, Item(*item))
            assert target.files["f"] == whole.files["f"]
        for record in records:
            for name, offset, length, text in record["blobs"]:
                assert name == "f"
                assert text == checksums.digest("crc32c", bytes(whole.files["f"][offset : offset + length]))


def test_a_record_that_does_not_fit_is_refused(spec: Spec) -> None:
    specs = [spec("a"), spec("b")]
    with ZtWriter(MemoryTarget().create("f"), specs) as writer:
        record = feed(writer, Item(specs[0], {"data": F32}))
        feed(writer, Item(specs[1], {"data": F32}))
    moved = {**record, "blobs": [["f", 128, 16, "crc32c:0x0"]]}
    other, layout = "writer.order", "zt.resume-record"
    for bad, rule in (
        ({}, other),
        ({**record, "name": "b"}, other),
        (moved, layout),
        ({**record, "blobs": []}, layout),
        ({**record, "blobs": [["f", "x", 1, ""]]}, layout),
    ):
        writer = ZtWriter(MemoryTarget().create("f"), specs)
        with pytest.raises(UsageError) as caught:
            writer.restore(bad)
        assert caught.value.rule == rule
    writer = ZtWriter(MemoryTarget().create("f"), specs)
    with pytest.raises(FormatError) as refused:
        writer.restore({**record, "blobs": [["f", 64, 12, "crc32c:0x0"]]})
    assert refused.value.rule == "zt.dense-size"


def test_misuse_is_refused(spec: Spec) -> None:
    def writer(*specs: TensorSpec) -> ZtWriter:
        return ZtWriter(MemoryTarget().create("f"), specs or None)

    def too_much(w: ZtWriter) -> None:
        w.begin(spec())
        w.write("data", F32)
        w.write("data", b"x")

    def too_little(w: ZtWriter) -> None:
        w.begin(spec())
        w.write("data", F32[:-1])
        w.end()

    def begun_twice(w: ZtWriter) -> None:
        w.begin(spec("a"))
        w.begin(spec("b"))

    def finished_open(w: ZtWriter) -> None:
        w.begin(spec())
        w.finish()

    def unknown_role(w: ZtWriter) -> None:
        w.begin(spec())
        w.write("dada", F32)

    cases: list[tuple[Callable[[ZtWriter], Any], str]] = [
        (too_much, "writer.length"),
        (too_little, "writer.length"),
        (begun_twice, "writer.order"),
        (finished_open, "writer.incomplete"),
        (unknown_role, "writer.role"),
        (lambda w: w.write("data", F32), "writer.role"),
        (lambda w: w.end(), "writer.role"),
        (lambda w: w.restore({"name": "t"}), "writer.order"),
        (lambda w: [feed(w, Item(spec(), {"data": F32})) for _ in range(2)], "writer.duplicate"),
    ]
    for act, rule in cases:
        with pytest.raises(UsageError) as caught:
            act(writer())
        assert caught.value.rule == rule
    for act, rule in ((lambda w: w.begin(spec("b")), "writer.order"), (lambda w: w.finish(), "writer.incomplete")):
        with pytest.raises(UsageError) as caught:
            act(writer(spec("a")))
        assert caught.value.rule == rule
    with pytest.raises(UsageError) as caught:
        ZtWriter(MemoryTarget().create("f"), digest="md5")
    assert caught.value.rule == "zt.digest-option"


REFUSED: dict[str, tuple[TensorSpec, str]] = {
    "dtype": (TensorSpec("t", (4,), "f9", "dense", (PartSpec("data", "f9", 16),)), "zt.dtype-unknown"),
    "size": (TensorSpec("t", (5,), "f32", "dense", (PartSpec("data", "f32", 16),)), "zt.dense-size"),
    "conflict": (TensorSpec("t", (4,), "i32", "dense", (PartSpec("data", "f32", 16),)), "zt.dtype-conflict"),
    "role": (TensorSpec("t", (4,), "f32", "dense", (PartSpec("dada", "f32", 16),)), "zt.part-missing"),
    "role of unknown length": (
        TensorSpec("t", (4,), "f32", "sparse_coo", (PartSpec("values", "f32", None),)),
        "zt.part-missing",
    ),
    "twice": (TensorSpec("t", (4,), "f32", "dense", (PartSpec("data", "f32", 16),) * 2), "zt.duplicate-role"),
    "encoding": (
        TensorSpec("t", (4,), "f32", "dense", (PartSpec("data", "f32", 16, encoding="lz4"),)),
        "zt.encoding-unknown",
    ),
    "zstd": (
        TensorSpec("t", (4,), "f32", "dense", (PartSpec("data", "f32", None, encoding="zstd"),)),
        "zt.uncompressed-length-missing",
    ),
    "storage": (TensorSpec("t", (4,), "f8_e5m2", "dense", (PartSpec("data", "i8", 4, "f8_e5m2"),)), "zt.type-storage"),
    "negative": (TensorSpec("t", (-4,), "f32", "dense", (PartSpec("data", "f32", 16),)), "zt.field-range"),
    "parameters": (
        TensorSpec("t", (4,), "f32", "dense", (PartSpec("data", "f32", 16),), {"x": object()}),
        "cbor.type",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_is_refused_before_it_is_written(case: str) -> None:
    spec, rule = REFUSED[case]
    assert ZtFormat().why_unsupported(spec) is not None
    target = MemoryTarget()
    writer = ZtWriter(target.create("f"))
    with pytest.raises(UnsupportedError) as caught:
        writer.begin(spec)
    assert caught.value.rule == rule
    assert len(target.files["f"]) == 8


def test_wrong_sizes_that_only_the_bytes_tell_are_refused_at_the_end() -> None:
    parts = (PartSpec("values", "f32", None), PartSpec("coords", "u64", None))
    spec = TensorSpec("t", (9,), "f32", "sparse_coo", parts)
    assert ZtFormat().why_unsupported(spec) is None
    writer = ZtWriter(MemoryTarget().create("f"))
    with pytest.raises(FormatError) as caught:
        feed(writer, Item(spec, {"values": bytes(8), "coords": bytes(8)}))
    assert caught.value.rule == "zt.sparse-size"


def test_the_logical_dtype_is_stated_where_the_parts_do_not_tell_it(read: Read, write: Write) -> None:
    parts = (PartSpec("packed_weight", "u8", 2), PartSpec("scales", "f16", 2))
    bf16 = TensorSpec("bf16", (1, 4), "bf16", "affine", parts, {"bits": 4})
    f16 = TensorSpec("f16", (1, 4), "f16", "affine", parts, {"bits": 4})
    data = {"packed_weight": b"ab", "scales": b"cd"}
    found = read(write((bf16, data), (f16, data))).tensors
    assert found["bf16"].dtype == "bf16"
    assert found["bf16"].params == {"bits": 4, "dtype": "bf16"}
    assert found["f16"].dtype == "f16"
    assert found["f16"].params == {"bits": 4}


def test_an_exception_aborts_and_leaves_no_manifest(tmp_path: Path, spec: Spec) -> None:
    sink = LocalTarget(tmp_path).create("m.zt")
    with pytest.raises(UsageError), ZtWriter(sink) as writer:
        feed(writer, Item(spec(), {"data": F32 + F32}))
    with pytest.raises(FormatError) as caught:
        ZtFormat().read(LocalStore(tmp_path), "m.zt")
    assert caught.value.rule in ("zt.truncated", "zt.footer-magic")


def test_a_full_disk_for_spooled_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    writer = ZtWriter(MemoryTarget().create("f"))
    writer.begin(zstd_spec())
    writer.write("packed_weight", b"x")
    with pytest.raises(ResourceError) as caught:
        writer.write("zeros", b"x")
    assert caught.value.rule == "store.disk-full"
    writer.abort()


def test_arrays_and_views_of_any_type_are_taken_as_bytes(spec: Spec, write: Write) -> None:
    array = np.arange(4, dtype="<f4")
    kinds = [F32, bytearray(F32), memoryview(F32), memoryview(array), memoryview(array.reshape(2, 2))]
    assert len({write((spec(), {"data": kind})) for kind in kinds}) == 1
