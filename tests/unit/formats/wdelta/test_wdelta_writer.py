"""Writing .wdelta: late metadata, parts in turns, the digest that follows the file, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.table import CODECS
from ingot.errors import IngotError, IntegrityError, ResourceError, UnsupportedError, UsageError
from ingot.formats.base import WriteOptions
from ingot.formats.wdelta import digest
from ingot.formats.wdelta.digest import TrailingDigest, check_digest
from ingot.formats.wdelta.format import WdeltaFormat
from ingot.formats.wdelta.writer import UNKNOWN, WdeltaWriter
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.delta import Change, DeltaInfo, Identity
from ingot.model.spec import TensorSpec
from ingot.stores.local import LocalStore, LocalTarget
from ingot.stores.memory import MemoryTarget
from ingot.testing.codecs import encode_parts
from ingot.testing.formats import Item, feed
from tests.support.stores import FullTarget
from tests.support.wdelta import PARENT

FORMAT = WdeltaFormat()
CONTENT = "blake3:" + "1" * 64


def item(
    name: str, codec: str = "delta_int4", shape: tuple[int, ...] = (30, 40)
) -> tuple[TensorSpec, dict[str, bytes]]:
    encoder = CODECS[codec].encoder(shape, "f32", {})
    values = np.random.default_rng(0).normal(0, 0.01, shape).astype(np.float32)
    parts = {role: array.tobytes() for role, array in encode_parts(CODECS[codec], encoder, values).items()}
    return TensorSpec(name, shape, "f32", codec, encoder.parts, encoder.params), parts


ITEMS = [item("a"), item("b", "delta_sparse"), item("c", "delta_sign", (16, 9))]


def metadata(parent: str = PARENT, **changes: Any) -> dict[str, Any]:
    info = DeltaInfo(1, "int4", Identity(hashes={"wdelta": parent}), tensors={})
    info = info.__class__(**{**{field: getattr(info, field) for field in info.__struct_fields__}, **changes})
    return {"delta": info.to_metadata()}


def write(writer: WdeltaWriter, turns: bool = False) -> None:
    for spec, parts in ITEMS:
        writer.begin(spec)
        pieces = [(role, data[at : at + 100]) for role, data in parts.items() for at in range(0, len(data), 100)]
        order = range(len(pieces))
        if turns:  # the bytes of a part stay in order, the parts alternate
            order = sorted(order, key=lambda at: sum(pieces[before][0] == pieces[at][0] for before in range(at)))
        for at in order:
            writer.write(*pieces[at])
        writer.end()


def made(described: dict[str, Any], turns: bool = False) -> bytes:
    target = MemoryTarget()
    writer = FORMAT.writer(target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], described), WriteOptions())
    write(writer, turns)
    assert writer.finish() == ["x.wdelta"]
    return bytes(target.files["x.wdelta"])


def test_parts_in_turns_give_the_same_file() -> None:
    data = made(metadata())
    assert made(metadata(), turns=True) == data
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


@pytest.mark.parametrize("wrong", ["more", "another", "missing"])
def test_a_whole_tensor_has_the_parts_of_its_spec(wrong: str) -> None:
    target = MemoryTarget()
    writer = FORMAT.writer(target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], metadata()), WriteOptions())
    spec, parts = ITEMS[0]
    last, data = list(parts.items())[-1]
    given = parts if wrong == "more" else {role: each for role, each in parts.items() if role != last}
    with pytest.raises(UsageError) as caught:
        feed(writer, Item(spec, given if wrong == "missing" else {**given, "stray": data}))
    assert caught.value.rule == ("writer.length" if wrong == "missing" else "writer.role")


def test_the_digest_follows_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_MIN_STEP", 10)
    monkeypatch.setattr(digest, "_CHUNK", 333)
    writer = FORMAT.writer(
        LocalTarget(tmp_path), "x.wdelta", Artifact([spec for spec, _ in ITEMS], metadata()), WriteOptions()
    )
    write(writer, turns=True)
    writer.finish()
    assert (tmp_path / "x.wdelta").read_bytes() == made(metadata())
    for io in ("mmap", "pread"):
        seen: list[int] = []
        source = LocalStore(tmp_path, io=io).open("x.wdelta")
        check_digest(source, seen.append)
        source.close()
        assert sum(seen) == source.size - 32


def test_a_parent_hash_that_comes_late() -> None:
    target = MemoryTarget()
    writer = FORMAT.writer(target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], metadata(UNKNOWN)), WriteOptions())
    write(writer)
    writer.amend(metadata())
    writer.finish()
    assert bytes(target.files["x.wdelta"]) == made(metadata())


def test_a_parent_hash_that_changes_is_hashed() -> None:
    target = MemoryTarget()
    writer = FORMAT.writer(
        target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], metadata("f" * 64)), WriteOptions()
    )
    write(writer)
    writer.amend(metadata())
    writer.finish()
    assert bytes(target.files["x.wdelta"]) == made(metadata())


def test_a_parent_hash_that_never_comes_is_refused() -> None:
    for described in (metadata(UNKNOWN), metadata(base=Identity())):
        writer = FORMAT.writer(
            MemoryTarget(), "x.wdelta", Artifact([spec for spec, _ in ITEMS], described), WriteOptions()
        )
        write(writer)
        with pytest.raises(UsageError) as caught:
            writer.finish()
        assert caught.value.rule == "wdelta.parent-hash"
        writer.abort()


def test_metadata_of_another_length_is_refused_late() -> None:
    target = MemoryTarget()
    writer = FORMAT.writer(target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], metadata()), WriteOptions())
    write(writer)
    with pytest.raises(UsageError) as caught:
        writer.amend({**metadata(), "more": "text"})
    assert caught.value.rule == "writer.metadata"
    writer.finish()
    assert bytes(target.files["x.wdelta"]) == made(metadata())


def test_identities_and_metadata_come_back() -> None:
    described = {"format": "pt", "nested": {"a": [1, None, 0.5]}} | metadata(
        strategy="auto",
        base=Identity(CONTENT, {"wdelta": PARENT, "other": "x"}),
        result=Identity(CONTENT),
        tensors={spec.name: Change("apply", "bf16") for spec, _ in ITEMS},
    )
    data = made(described)
    assert dict(_open(data).metadata) == described
    assert FORMAT.size(Artifact([spec for spec, _ in ITEMS], described), WriteOptions()) == len(data)


def _open(data: bytes) -> Any:
    from ingot.formats.wdelta.reader import read_catalog

    return read_catalog(MemorySource(data), "x.wdelta")


@pytest.mark.parametrize(
    ("described", "rule"),
    [
        ({}, "wdelta.metadata"),
        (metadata(tensors={"a": Change("replace", "f32")}), "wdelta.change"),
        (metadata(tensors={"a": Change("same", "f32")}), "wdelta.change"),
        (metadata(tensors={"a": Change("apply", "odd")}), "wdelta.change"),
        (metadata(tensors={"a": Change("apply", "f32")}), "wdelta.change"),
        (metadata(removed=["z"]), "wdelta.change"),
        (metadata("12"), "wdelta.change"),
        ({**metadata(), "x": b"bytes"}, "wdelta.metadata"),
        ({**metadata(), "x": float("nan")}, "wdelta.metadata"),
    ],
)
def test_what_the_header_has_no_place_for_is_refused(described: dict[str, Any], rule: str) -> None:
    target = MemoryTarget()
    with pytest.raises(UnsupportedError) as caught:
        FORMAT.writer(target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], described), WriteOptions())
    assert caught.value.rule == rule
    assert target.files == {}


def _without(role: str) -> Callable[[TensorSpec], TensorSpec]:
    return lambda spec: replace(spec, parts=tuple(part for part in spec.parts if part.role != role))


def _part(index: int, **changes: Any) -> Callable[[TensorSpec], TensorSpec]:
    def change(spec: TensorSpec) -> TensorSpec:
        parts = list(spec.parts)
        parts[index] = replace(parts[index], **changes)
        return replace(spec, parts=tuple(parts))

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: replace(spec, codec="dense"),
        lambda spec: replace(spec, codec="affine"),
        lambda spec: replace(spec, dtype="bf16"),
        lambda spec: replace(spec, name="\ud800"),
        lambda spec: replace(spec, shape=(30, 41)),
        lambda spec: replace(spec, shape=(2**40, 2**40)),
        lambda spec: replace(spec, params={}),
        lambda spec: replace(spec, params={"layout": 3}),
        lambda spec: replace(spec, params={"layout": True}),
        lambda spec: replace(spec, params={"layout": 1, "outlier_fraction": "x"}),
        lambda spec: replace(spec, params={"layout": 1, "outlier_fraction": float("inf")}),
        lambda spec: replace(spec, params={"layout": 2}),
        _without("scale"),
        _part(0, dtype="u8"),
        _part(0, length=None),
        _part(0, encoding="zstd", uncompressed_length=96),
        _part(0, length=97),
        _part(0, length=88),
        _part(4, length=1),
    ],
)
def test_what_the_format_cannot_carry_is_refused(change: Callable[[TensorSpec], TensorSpec]) -> None:
    spec = ITEMS[0][0]
    assert FORMAT.why_unsupported(spec) is None
    assert FORMAT.why_unsupported(change(spec))
    with pytest.raises(UnsupportedError) as caught:
        FORMAT.writer(MemoryTarget(), "x.wdelta", Artifact([change(spec)], metadata()), WriteOptions())
    assert caught.value.rule == "wdelta.unsupported"


def test_dense_weights_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ingot.save(tmp_path / "x.wdelta", {"a": np.zeros(3, np.float32)})
    assert caught.value.rule == "save.unsupported"
    assert list(tmp_path.iterdir()) == []


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        FORMAT.writer(MemoryTarget(), "x.wdelta", Artifact([ITEMS[0][0]] * 2, metadata()), WriteOptions())
    assert caught.value.rule == "writer.duplicate"


def test_a_record_of_another_layout_is_refused() -> None:
    specs = [spec for spec, _ in ITEMS]
    first = FORMAT.writer(MemoryTarget(), "x.wdelta", Artifact(specs, metadata()), WriteOptions())
    first.begin(specs[0])
    for role, data in ITEMS[0][1].items():
        first.write(role, data)
    record = first.end()
    first.abort()
    record["blobs"][0][1] += 1
    second = FORMAT.writer(MemoryTarget(), "x.wdelta", Artifact(specs, metadata()), WriteOptions())
    with pytest.raises(IntegrityError) as caught:
        second.restore(record)
    assert caught.value.rule == "writer.record"
    second.abort()


@pytest.mark.parametrize("room", [0, 100, 900, 2000])
def test_a_full_disk_is_told(room: int) -> None:
    target = FullTarget(MemoryTarget(), room)

    def run() -> None:
        writer = FORMAT.writer(target, "x.wdelta", Artifact([spec for spec, _ in ITEMS], metadata()), WriteOptions())
        write(writer)
        writer.finish()

    with pytest.raises(ResourceError) as caught:
        run()
    assert caught.value.rule == "store.disk-full"


def test_what_cannot_be_read_back_is_told() -> None:
    class Broken:
        def readinto(self, offset: int, out: memoryview) -> None:
            raise IntegrityError("store.short-read", "gone")

        def write_at(self, offset: int, data: Any) -> None: ...
        def truncate(self, size: int) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(IngotError) as caught:
        TrailingDigest(Broken()).finish(10)
    assert caught.value.rule == "store.short-read"


def test_a_delta_beside_whole_weights_is_not_the_folders_checkpoint() -> None:
    assert FORMAT.entry(["a.wdelta"]) == "a.wdelta"
    assert FORMAT.entry(["a.wdelta", "model.wdelta"]) == "model.wdelta"
    assert FORMAT.entry(["a.wdelta", "b.wdelta"]) is None
    assert FORMAT.entry(["model.wdelta", "model.safetensors"]) is None


def test_tensors_are_ordered_by_name() -> None:
    specs = [replace(ITEMS[0][0], name=name) for name in ("layers.2", "layers.10", "é", "Z", "a")]
    assert [specs[index].name for index in FORMAT.order(specs)] == ["Z", "a", "layers.10", "layers.2", "é"]


def test_a_version_2_file_says_so() -> None:
    encoder = CODECS["delta_int4"].encoder((3, 4), "f32", {"layout": 2})
    spec = TensorSpec("x", (3, 4), "f32", "delta_int4", encoder.parts, encoder.params)
    target = MemoryTarget()
    writer = FORMAT.writer(target, "x.wdelta", Artifact([spec], metadata()), WriteOptions())
    writer.begin(spec)
    for part in spec.parts:
        writer.write(part.role, bytes(part.length or 0))
    writer.end()
    writer.finish()
    data = bytes(target.files["x.wdelta"])
    assert data[7:11] == b"\2\0\0\0"
    assert b'"int4_layout":2' in data
    assert b'"base_dtype":"float32"' in data
    assert _open(data).tensors["x"].params == {"outlier_fraction": 0.01, "layout": 2}


def test_a_part_that_is_not_there_is_refused() -> None:
    writer = FORMAT.writer(MemoryTarget(), "x.wdelta", Artifact([ITEMS[0][0]], metadata()), WriteOptions())
    writer.begin(ITEMS[0][0])
    with pytest.raises(UsageError):
        writer.write("values", b"")
    writer.abort()
