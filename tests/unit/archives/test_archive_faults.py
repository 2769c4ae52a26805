"""Damaged, truncated and hostile archives: damage is found, complete files are restored, bad layouts are refused."""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.archives.archive import archive
from ingot.archives.restore import restore
from ingot.artifacts.archive_layout import KEY, LAYOUT, ArchivedFile, ArchiveLayout, Span, parse_layout
from ingot.core.bytes.encodings import compress_frame
from ingot.errors import FormatError, IngotError
from ingot.formats.zt.manifest import align
from ingot.formats.zt.writer import ZtWriter
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.local import LocalTarget
from tests.support.libraries import contents


def is_found(damaged: Path, out: Path) -> bool:
    """Return whether both ``verify`` and ``restore`` report damage, and no restored file differs silently."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        reported = bool(restore(damaged, out).damaged)
    except IngotError:
        reported = True
    try:
        errors = any(item.level == "error" for item in ingot.verify(damaged))
    except IngotError:
        errors = True
    return reported and errors


def flip(path: Path, position: int, bit: int, target: Path) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    target.write_bytes(data)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small archive with an object of each type."""
    source = tmp_path / "source"
    source.mkdir()
    rng = np.random.default_rng(0)
    tensors = {"x": rng.standard_normal((40, 33), np.float32), "y": rng.integers(0, 3, 2000, np.uint8)}
    ingot.save(source / "m.safetensors", {**tensors, "z": rng.integers(0, 256, 1500, np.uint8)})
    (source / "config.json").write_text("{}")
    archive(source, tmp_path / "small.zt")
    return tmp_path / "small.zt"


def regions(path: Path) -> list[int]:
    """Return positions in each region: magics, parts, padding, manifest and footer."""
    data = path.read_bytes()
    start = len(data) - 16 - struct.unpack("<Q", data[-16:-8])[0]
    fixed = [0, 7, 8, 63, 64, 67, 80, start, start - 1, start + 1, len(data) - 17, len(data) - 16, len(data) - 1]
    names = [data.index(name) + 1 for name in (b"ingot_digest", b"ingot_archive", b"attributes", b"crc32c:", b"1.2.0")]
    padding = [position for position in range(64, start) if data[position] == 0 and align(position + 1) == position + 1]
    spread = list(range(64, len(data), max(1, len(data) // 8)))
    return [*fixed, *names, *padding[:2], *spread]


def test_a_flipped_byte_in_any_region_is_found(small, tmp_path):
    for position in regions(small):
        flip(small, position, position % 8, tmp_path / "bad.zt")
        assert is_found(tmp_path / "bad.zt", tmp_path / "out"), position


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_flips_are_found(small, tmp_path):
    rng = random.Random(0)
    size = small.stat().st_size
    for _ in range(10_000):
        position = rng.randrange(size)
        flip(small, position, rng.randrange(8), tmp_path / "bad.zt")
        assert is_found(tmp_path / "bad.zt", tmp_path / "out"), position


def test_other_files_are_restored_from_a_damaged_archive(small, tmp_path):
    data = bytearray(small.read_bytes())
    with ingot.open(small) as opened:
        store = opened.source.store
        tensor = store.objects.tensor(len(store.layout.objects) - 1)
    data[next(iter(tensor.parts.values())).offset + 5] ^= 1
    (tmp_path / "bad.zt").write_bytes(data)
    expected = contents(tmp_path / "source")
    result = restore(tmp_path / "bad.zt", tmp_path / "out")
    restored = contents(tmp_path / "out")
    assert result.damaged
    assert restored.items() < expected.items()


def test_damage_in_an_archive_that_was_cut_off_is_found(small, tmp_path):
    """Without the manifest no digest of an object is known: the SHA-256 of the file decides."""
    with ingot.open(small) as opened:
        objects = opened.source.store.objects
        raw = [objects.tensor(index) for index in range(len(objects.layout.objects))]
        part = next(part for tensor in raw if tensor.name == "z" for part in tensor.parts.values())
    assert part.encoding == "raw"
    data = bytearray(small.read_bytes()[:-20])
    data[part.offset + 5] ^= 1
    (tmp_path / "bad.zt").write_bytes(data)
    result = restore(tmp_path / "bad.zt", tmp_path / "out")
    assert any("m.safetensors" in line and "archive.digest" in line for line in result.damaged)
    assert contents(tmp_path / "out").keys() == {"config.json"}


def test_truncated_archives_restore_what_is_complete(archived, model, tmp_path):
    data = archived.read_bytes()
    expected = contents(model)
    counts = []
    for size in (len(data) - 1, len(data) - 20, len(data) * 3 // 4, len(data) // 2, len(data) // 4):
        (tmp_path / "cut.zt").write_bytes(data[:size])
        result = restore(tmp_path / "cut.zt", tmp_path / f"out{size}")
        restored = contents(tmp_path / f"out{size}")
        assert restored.items() <= expected.items()
        assert result.damaged[0].endswith("[zt.footer-magic]")
        assert len(result.damaged) == 1 + len(expected) - len(restored)
        counts.append(len(restored))
    assert counts[0] == len(expected)
    assert counts == sorted(counts, reverse=True)
    assert 0 < counts[-1] < len(expected)
    for size in (0, 8, 64, 70, 200):
        (tmp_path / "cut.zt").write_bytes(data[:size])
        with pytest.raises(IngotError):
            restore(tmp_path / "cut.zt", tmp_path / "none")
        assert not (tmp_path / "none").exists()


def spec(name: str = "x", size: int = 1000) -> TensorSpec:
    return TensorSpec(name, (size,), "u8", "dense", (PartSpec("data", "u8", size),))


def layout(
    files: list[ArchivedFile], folder: bool = True, objects: tuple[TensorSpec, ...] = (spec(),)
) -> ArchiveLayout:
    return ArchiveLayout(folder, objects, files)


def file(name: str = "a", size: int = 1000, spans: tuple[Span, ...] = (Span(0, 0, 1000),)) -> ArchivedFile:
    return ArchivedFile(name, size, "0" * 64, spans)


def test_a_sound_layout_is_read_back():
    original = layout([file()])
    parsed = parse_layout(original.encoded(), 2000, "x")
    assert (parsed.files, parsed.objects, parsed.folder) == (tuple(original.files), tuple(original.objects), True)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (layout([file("../a")]), "archive.name"),
        (layout([file("/a")]), "archive.name"),
        (layout([file("a/../b")]), "archive.name"),
        (layout([file("C:a")]), "archive.name"),
        (layout([file("a\\b")]), "archive.name"),
        (layout([file("a\n")]), "archive.name"),
        (layout([file("")]), "archive.name"),
        (layout([file("a"), file("a")]), "archive.duplicate"),
        (layout([file("a"), file("A")]), "archive.collision"),
        (layout([file("a"), file("a/b")]), "archive.conflict"),
        (layout([file("a"), file("b")], folder=False), "archive.layout"),
        (layout([file("b/a")], folder=False), "archive.layout"),
        (layout([]), "archive.layout"),
        (layout([file(spans=(Span(0, 1, 1000),))]), "archive.span"),
        (layout([file(spans=(Span(1, 0, 1000),))]), "archive.span"),
        (layout([file(spans=(Span(0, 1 << 52, 1000),))]), "archive.span"),
        (layout([file(size=999)]), "archive.span"),
        (layout([file(size=1 << 50)]), "archive.span"),
        (layout([file(size=1000, spans=(Span(0, 0, 1000), Span(0, 0, 0)))]), "archive.span"),
        (layout([file()], objects=(spec(), spec("y"))), "archive.layout"),
        (layout([file()], objects=(spec(), spec())), "archive.layout"),
        (layout([file()], objects=(spec(size=-1000),)), "archive.layout"),
        (layout([file(size=1 << 52, spans=(Span(0, 0, 1 << 52),))], objects=(spec(size=1 << 52),)), "archive.total"),
    ],
)
def test_hostile_layouts_are_refused(bad, expected):
    with pytest.raises(FormatError) as caught:
        parse_layout(bad.encoded(), 2000, "x")
    assert caught.value.rule == expected


@pytest.mark.parametrize(
    "change",
    [
        {"format": "ingot-archive-2"},
        {"folder": 1},
        {"objects": {}},
        {"objects": [1]},
        {"objects": [{"name": "x"}]},
        {"files": None},
        {"files": [{"name": 3, "size": 0, "sha256": "0" * 64, "spans": []}]},
        {"files": [{"name": "a", "size": True, "sha256": "0" * 64, "spans": []}]},
        {"files": [{"name": "a", "size": 0, "sha256": "0" * 63, "spans": []}]},
        {"files": [{"name": "a", "size": 0, "sha256": "0" * 64, "spans": {}}]},
        {"files": [{"name": "a", "size": 1, "sha256": "0" * 64, "spans": [[0, 0, True]]}]},
        {"files": [{"name": "a", "size": 1, "sha256": "0" * 64, "spans": [[0, -1, 2]]}]},
    ],
)
def test_malformed_layouts_are_refused(change):
    fields = json.loads(layout([file()]).encoded()) | change
    with pytest.raises(FormatError) as caught:
        parse_layout(json.dumps(fields).encode(), 2000, "x")
    assert (caught.value.rule or "").startswith("archive.")


def write(path: Path, raw: bytes, objects: dict[str, bytes]) -> None:
    """Write an archive with any layout."""
    frame = compress_frame(raw)
    part = PartSpec("data", "u8", len(frame), encoding="zstd", uncompressed_length=len(raw))
    with ZtWriter(LocalTarget(path.parent).create(path.name), metadata={KEY: LAYOUT}) as writer:
        writer.begin(TensorSpec(LAYOUT, (len(raw),), "u8", "dense", (part,)))
        writer.write("data", frame)
        writer.end()
        for name, data in objects.items():
            writer.begin(spec(name, len(data)))
            writer.write("data", data)
            writer.end()


def test_layouts_and_objects_must_agree(tmp_path):
    path = tmp_path / "a.zt"
    good = layout([file()])
    for objects, expected in (
        ({}, "archive.object"),
        ({"x": bytes(999)}, "archive.object"),
        ({"x": bytes(1000), "y": b"0"}, "archive.object"),
        ({"x": bytes(1000)}, "archive.digest"),
    ):
        write(path, good.encoded(), objects)
        errors = [item.rule for item in ingot.verify(path) if item.level == "error"]
        assert expected in errors
    with pytest.raises(IngotError) as caught:
        restore(path, tmp_path / "out")
    assert caught.value.rule == "archive.digest"
    assert not (tmp_path / "out").exists()
    write(path, replace(good, files=[file("../../evil")]).encoded(), {"x": bytes(1000)})
    with pytest.raises(IngotError) as caught:
        restore(path, tmp_path / "out")
    assert caught.value.rule == "archive.name"


def test_sizes_are_compared_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.artifacts.archive_layout._FLOOR", 1 << 10)
    monkeypatch.setattr("ingot.artifacts.archive_layout._RATIO", 10)
    path = tmp_path / "a.zt"
    spans = tuple(Span(0, 0, 1000) for _ in range(1000))
    files = [file("a", 1_000_000, spans)]
    write(path, layout(files).encoded(), {"x": bytes(1000)})
    with pytest.raises(IngotError) as caught:
        restore(path, tmp_path / "out")
    assert caught.value.rule == "archive.total"
