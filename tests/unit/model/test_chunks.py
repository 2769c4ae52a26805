"""Digests of chunks: a range of a large part is proven as the whole is, and nothing else is read for it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.codecs.table import CODECS
from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import CHUNK, LARGE, ChunkedHasher
from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.formats.base import WriteOptions
from ingot.formats.table import FORMATS
from ingot.formats.zt.format import ZtFormat
from ingot.formats.zt.reader import read_catalog
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor
from ingot.stores.memory import MemoryTarget
from tests.support.zt import component, manifest, tensor, zt_file

ROW = 4096  # bytes of a row of the tensors below
ROWS = (LARGE + CHUNK + CHUNK // 2) // ROW


class Counting(MemorySource):
    """Counts the bytes that are asked for."""

    def __init__(self, data: bytes, *, mapped: bool) -> None:
        super().__init__(data)
        self.mapped, self.read = mapped, 0

    def view(self, offset: int, length: int) -> memoryview:
        self.read += length
        return super().view(offset, length)


@pytest.fixture(scope="module", params=["zt", "squizd"])
def large(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, np.ndarray[Any, Any]]:
    values = np.random.default_rng(1).integers(0, 1 << 31, (ROWS, ROW // 4), np.int32).view(np.float32)
    path = tmp_path_factory.mktemp("large") / f"m.{request.param}"
    ingot.save(path, {"other.weight": values[:3], "some.weight": values})
    return path, values


def damaged(path: Path, tmp_path: Path, values: np.ndarray[Any, Any], byte: int) -> Path:
    data = bytearray(path.read_bytes())
    data[data.index(values.tobytes()) + byte] ^= 16
    target = tmp_path / path.name
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_damage_shows_in_the_chunks_that_are_touched_and_in_no_other(
    large: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path, io: str
) -> None:
    path, values = large
    per_chunk = CHUNK // ROW
    with ingot.open(damaged(path, tmp_path, values, 2 * CHUNK + 5), io=io) as checkpoint:
        some = checkpoint["some.weight"]
        for rows in (slice(per_chunk, 2 * per_chunk), slice(3 * per_chunk, 3 * per_chunk + 1), slice(-1, None)):
            assert some[rows].tobytes() == values[rows].tobytes()
        for rows in (2 * per_chunk, 3 * per_chunk - 1, slice(2 * per_chunk - 1, 2 * per_chunk + 1), slice(1, -1)):
            for _ in range(2):
                with pytest.raises(IntegrityError) as caught:
                    checkpoint.get_slice("some.weight")[rows]
                assert caught.value.rule == "part.digest-mismatch"
                assert "some.weight" in (caught.value.where or "")
                assert re.search(rf"\b{2 * CHUNK} to {3 * CHUNK}\b.*\bchunk 2\b", caught.value.message)
        with pytest.raises(IntegrityError):
            some.parts["data"].readinto(2 * CHUNK + 100, memoryview(bytearray(1)))
    findings = [item for item in ingot.verify(tmp_path / path.name) if item.level == "error"]
    assert [item.rule for item in findings] == ["part.digest-mismatch"]
    assert "chunk 2" in findings[0].message


def test_a_compressed_part_has_digests_of_its_stored_bytes(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 256, (ROWS, ROW), np.uint8)
    recipe = tmp_path / "z.toml"
    recipe.write_text('name = "z"\n[[rules]]\nmatch = ["*"]\ncodec = "dense"\nencoding = "zstd"\n')
    ingot.save(tmp_path / "a.safetensors", {"w": values})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "a.zt", recipe=str(recipe))
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        part = checkpoint["w"].parts["data"]
        assert (part.encoding, part.length > LARGE, part.chunks is not None) == ("zstd", True, True)
        data, place = bytearray((tmp_path / "a.zt").read_bytes()), part.offset + 5 * CHUNK + 100
        np.testing.assert_array_equal(checkpoint["w"][300:302], values[300:302])
    data[place] ^= 1
    (tmp_path / "b.zt").write_bytes(data)
    with ingot.open(tmp_path / "b.zt") as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][300:302], values[300:302])
        with pytest.raises(IntegrityError) as caught:
            checkpoint["w"][-1]
        assert "chunk 5" in caught.value.message


def test_of_a_large_part_the_chunks_touched_are_read_and_no_more(large: tuple[Path, np.ndarray[Any, Any]]) -> None:
    path, values = large
    with ingot.open(path) as checkpoint:
        some = checkpoint["some.weight"]
        data = bytes(some.parts["data"].view())
        for mapped, again in ((False, CHUNK), (True, 2 * ROW)):  # in a mapping what was proven stays so
            source = Counting(data, mapped=mapped)
            part = replace(some.parts["data"], source=source, offset=0)
            moved = Tensor("w", some.shape, some.dtype, some.codec, {"data": part}, decoder=CODECS["dense"])
            for most in (CHUNK, again):
                source.read = 0
                assert moved[700:702].tobytes() == values[700:702].tobytes()
                assert 0 < source.read <= most
            source.read = 0
            unchecked = replace(moved, parts={"data": replace(part, verify=False)})
            assert unchecked[700:702].tobytes() == values[700:702].tobytes()
            assert source.read == 2 * ROW


def test_a_small_part_is_proven_whole() -> None:
    data = bytes(range(256)) * 8
    part = component("u8", 64, len(data), digest=checksums.digest("crc32c", data))
    found = zt_file(manifest({"t": tensor((256, 8), components={"data": part})}), {64: data})
    for position in (0, 5, 2047):
        wrong = bytearray(found)
        wrong[64 + position] ^= 1
        moved = read_catalog(MemorySource(bytes(wrong))).tensors["t"]
        moved.decoder = CODECS["dense"]
        with pytest.raises(IntegrityError) as caught:
            moved[100]
        assert caught.value.rule == "part.digest-mismatch"


DATA = np.random.default_rng(3).bytes(10_000)
RIGHT = checksums.digest("crc32c", DATA)


def chunked(size: int, data: bytes = DATA, algorithm: str = "crc32c") -> bytes:
    running = ChunkedHasher(algorithm, size)
    running.update(data)
    return running.digests()


def stated(digest: str | None = RIGHT, **fields: Any) -> bytes:
    chunks = {"size": 4096, "digests": chunked(4096), **fields}
    part = component("u8", 64, len(DATA), digest=digest, ingot_chunks=chunks)
    return zt_file(manifest({"t": tensor((len(DATA),), components={"data": part})}), {64: DATA})


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (stated(), None),
        (stated(checksums.digest("sha256", DATA), digests=chunked(4096, DATA, "sha256")), None),
        (stated("blake9:00"), None),  # not known here: kept aside
        (stated(more=1), None),
        (stated(size=4097, digests=chunked(4097)), None),
        (stated(None), "zt.chunk-digests"),
        (stated(digests=chunked(4096)[:-1]), "zt.chunk-digests"),
        (stated(digests=chunked(4096) + bytes(4)), "zt.chunk-digests"),
        (stated(digests=b""), "zt.chunk-digests"),
        (stated(size=0), "zt.chunk-digests"),
        (stated(size=-4096), "zt.chunk-digests"),
        (stated(size=4095, digests=chunked(4095)), "zt.chunk-digests"),
        (stated(size=(1 << 24) + 1, digests=chunked(1 << 24)), "zt.chunk-digests"),
        (stated(size=1 << 62, digests=bytes(4)), "zt.chunk-digests"),
        (stated(size=(1 << 64) - 1), "zt.chunk-digests"),
        (stated(size="4096"), "zt.field-type"),
        (stated(digests="00"), "zt.field-type"),
        (stated(digests=[1]), "zt.field-type"),
    ],
)
def test_digests_of_chunks_fit_their_part(data: bytes, rule: str | None) -> None:
    if rule is None:
        part = read_catalog(MemorySource(data)).tensors["t"].parts["data"]
        out = bytearray(7)
        part.readinto(8190, memoryview(out))
        assert bytes(out) == DATA[8190:8197]
        return
    with pytest.raises(FormatError) as caught:
        read_catalog(MemorySource(data))
    assert caught.value.rule == rule


def test_verify_compares_the_chunks_where_the_whole_is_right(tmp_path: Path) -> None:
    wrong = bytearray(chunked(4096))
    wrong[5] ^= 1
    (tmp_path / "a.zt").write_bytes(stated(digests=bytes(wrong)))
    (finding,) = [item for item in ingot.verify(tmp_path / "a.zt") if item.level == "error"]
    assert (finding.rule, "chunk 1" in finding.message) == ("part.digest-mismatch", True)
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        assert checkpoint["t"].numpy().tobytes() == DATA


@given(st.sampled_from(["crc32c", "sha256"]), st.integers(1, 300), st.lists(st.binary(max_size=400), max_size=8))
def test_one_pass_gives_the_digests_of_chunks_and_of_the_whole(algorithm: str, size: int, pieces: list[bytes]) -> None:
    running, data = ChunkedHasher(algorithm, size), b"".join(pieces)
    for piece in pieces:
        running.update(piece)
    assert running.text() == checksums.digest(algorithm, data)
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert running.digests() == b"".join(checksums.raw(checksums.digest(algorithm, chunk)) for chunk in chunks)


def specs_of(length: int) -> list[TensorSpec]:
    return [
        TensorSpec("a", (length,), "u8", "dense", (PartSpec("data", "u8", length),)),
        TensorSpec("b", (3,), "u8", "dense", (PartSpec("data", "u8", 3),)),
    ]


@pytest.mark.parametrize("name", ["zt", "squizd"])
@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
def test_only_parts_above_8_mib_have_them_and_the_size_is_known_before(name: str, digest: str | None) -> None:
    for length in (LARGE, LARGE + 1):
        options, specs, data = WriteOptions(digest=digest), specs_of(length), bytes(length)
        files = []
        for record in (None, {}):
            target = MemoryTarget()
            if files:  # what a resumed run finds
                target.files["f"] = bytearray(files[0])
            writer = FORMATS[name].writer(target, "f", Artifact(specs), options)
            if record is None:
                writer.begin(specs[0])
                for start in range(0, length, 5_000_000):
                    writer.write("data", data[start : start + 5_000_000])
                kept = json.loads(json.dumps(writer.end()))
            else:
                writer.restore(kept)
            writer.begin(specs[1])
            writer.write("data", b"abc")
            writer.end()
            writer.finish()
            files.append(bytes(target.files["f"]))
        assert files[0] == files[1]
        assert len(files[0]) == FORMATS[name].size(Artifact(specs), options)
        parts = {"zt": b"ingot_chunks", "squizd": b"chunks"}[name] in files[0]
        assert parts == (length > LARGE and digest is not None)


def test_a_record_without_chunks_of_a_large_part_is_refused() -> None:
    specs, target = specs_of(LARGE + 1), MemoryTarget()
    writer = ZtFormat().writer(target, "f", Artifact(specs), WriteOptions())
    writer.begin(specs[0])
    writer.write("data", bytes(LARGE + 1))
    record = writer.end()
    for changed in ({"chunks": [None]}, {"chunks": ["00"]}, {"chunks": ["x"]}, {"chunks": []}):
        again = ZtFormat().writer(MemoryTarget(), "f", Artifact(specs), WriteOptions())
        with pytest.raises(UsageError) as caught:
            again.restore({**record, **changed})
        assert caught.value.rule == "zt.resume-record"
