"""Attachments through conversions and out again: draft heads and Core ML packages in a .squizd."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_cache_path

import ingot
from ingot.artifacts.attachments import (
    check_package,
    extract_coreml,
    extract_draft,
    extract_package,
    pack_package,
    require_package,
)
from ingot.artifacts.destination import destination
from ingot.artifacts.save import plan_tensors
from ingot.cli.main import run
from ingot.conversion.options import ConvertOptions
from ingot.conversion.prepare_source import prepare_source
from ingot.conversion.run import convert
from ingot.errors import FormatError, IngotError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.detect import FORMATS
from ingot.model.artifact import Attachments
from ingot.model.bytesource import MemorySource
from ingot.model.checkpoint import Checkpoint
from ingot.model.part import Part
from ingot.stores.cache import default_cache
from ingot.stores.local import LocalStore
from ingot.stores.location import Location
from ingot.testing.codecs import bits
from tests.support.drafts import draft_head

ROOT = "6A4C1F0E-0000-4000-8000-000000000001"
MANIFEST = {
    "fileFormatVersion": "1.0.0",
    "itemInfoEntries": {
        ROOT: {"author": "com.apple.CoreML", "name": "model.mlmodel", "path": "com.apple.CoreML/model.mlmodel"},
        "weights": {"author": "com.apple.CoreML", "name": "weights", "path": "com.apple.CoreML/weights"},
    },
    "rootModelIdentifier": ROOT,
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "Model.mlpackage"
    inner = folder / "Data" / "com.apple.CoreML"
    (inner / "weights").mkdir(parents=True)
    (folder / "Manifest.json").write_text(json.dumps(MANIFEST))
    (inner / "model.mlmodel").write_bytes(b"model")
    (inner / "weights" / "weight.bin").write_bytes(bytes(range(256)) * 9000)
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "head.safetensors", draft_head())
    return tmp_path / "head.safetensors"


@pytest.fixture
def model(tmp_path: Path, weights: Mapping[str, Any]) -> Path:
    ingot.save(tmp_path / "model.safetensors", weights)
    return tmp_path / "model.safetensors"


@pytest.fixture
def full(tmp_path: Path, model: Path, draft: Path, package: Path) -> Path:
    convert(model, tmp_path / "full.squizd", draft=draft, coreml=package)
    return tmp_path / "full.squizd"


def rule_of(attempt: Callable[[], object]) -> str | None:
    with pytest.raises(IngotError) as caught:
        attempt()
    return caught.value.rule


def test_both_go_in_and_come_out(tmp_path: Path, full: Path, package: Path) -> None:
    shape = extract_draft(full, tmp_path / "back.safetensors")
    assert (shape.layers, shape.draft_vocab, shape.vocab) == (1, 20, 50)
    with ingot.open(tmp_path / "back.safetensors") as back:
        head = draft_head()
        assert set(back) == set(head)
        assert all(bits(back[name].numpy()) == bits(head[name]) for name in head)
    out = extract_coreml(full, tmp_path / "cache")
    assert files_of(out) == files_of(package)
    assert out.parent == tmp_path / "cache"


def test_a_draft_head_comes_out_in_any_format(tmp_path: Path, full: Path) -> None:
    extract_draft(full, tmp_path / "head.zt")
    extract_draft(full, tmp_path / "folder")
    assert set(ingot.open(tmp_path / "head.zt")) == set(ingot.open(tmp_path / "folder")) == set(draft_head())
    assert rule_of(lambda: extract_draft(full, tmp_path / "folder")) == "target.exists"
    extract_draft(full, tmp_path / "folder", overwrite=True)


def test_attachments_travel_along_or_have_to_be_dropped(tmp_path: Path, full: Path) -> None:
    report = convert(full, tmp_path / "again.squizd")
    assert not report.notes
    with ingot.open(full) as one, ingot.open(tmp_path / "again.squizd") as two:
        assert set(two.attachments.names()) == {"draft", "coreml"}
        assert one.attachments.coreml is not None
        assert two.attachments.coreml is not None
        assert bytes(one.attachments.coreml.view()) == bytes(two.attachments.coreml.view())
        assert set(one.attachments.draft or ()) == set(two.attachments.draft or ())
    assert rule_of(lambda: convert(full, tmp_path / "plain.zt")) == "account.lost"
    assert rule_of(lambda: convert(full, tmp_path / "plain.zt", drop=["coreml"])) == "account.lost"
    assert not (tmp_path / "plain.zt").exists()
    report = convert(full, tmp_path / "plain.zt", drop=["draft", "coreml"])
    assert set(report.dropped) == {"draft", "coreml"}
    assert not report.exact


def test_what_is_asked_for_replaces_what_the_source_has(tmp_path: Path, full: Path) -> None:
    ingot.save(tmp_path / "other.zt", draft_head(layer="layers.0.", seed=8))
    convert(full, tmp_path / "again.squizd", draft=tmp_path / "other.zt")
    with ingot.open(tmp_path / "again.squizd") as found:
        assert "layers.0.mlp.up_proj.weight" in (found.attachments.draft or ())
        assert found.attachments.coreml is not None


@pytest.mark.parametrize("kind", ["draft", "coreml"])
@pytest.mark.parametrize("suffix", ["zt", "safetensors"])
def test_formats_that_carry_none_refuse(tmp_path: Path, model: Path, kind: str, suffix: str) -> None:
    options: Any = {kind: tmp_path / "nowhere"}
    with pytest.raises(UnsupportedError) as caught:
        convert(model, tmp_path / f"out.{suffix}", **options)
    assert caught.value.rule == "convert.attachment"
    assert not (tmp_path / f"out.{suffix}").exists()


def test_bad_attachments_are_refused_before_anything_is_written(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out.squizd"
    assert rule_of(lambda: convert(model, out, draft=model)) == "draft.missing"
    assert rule_of(lambda: convert(model, out, draft=tmp_path / "nowhere")) == "open.missing"
    assert rule_of(lambda: convert(model, out, coreml=tmp_path / "nowhere")) == "open.missing"
    assert rule_of(lambda: convert(model, out, coreml=tmp_path)) == "attachments.coreml-package"
    assert not out.exists()


def test_a_broken_draft_head_in_the_source_is_not_carried_on(tmp_path: Path) -> None:
    head = draft_head()
    head["d2t"][3] = 1000
    tensors = {tensor.name: tensor for tensor, _ in plan_tensors(FORMATS["zt"], head)}
    source = Checkpoint({}, format="squizd", location="", attachments=Attachments(draft=tensors))
    options = ConvertOptions("", "")
    assert (
        rule_of(lambda: prepare_source(source, destination(Location.parse("x.squizd")), options, {})) == "draft.range"
    )
    assert (
        prepare_source(source, destination(Location.parse("x.zt")), options, {}).checkpoint.attachments == Attachments()
    )
    assert source.attachments.draft is tensors


def test_a_resumed_run_must_have_the_same_attachments(
    tmp_path: Path, model: Path, draft: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ingot.core.files.atomic import Staging

    out = tmp_path / "out.squizd"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt() -> None:
        monkeypatch.setattr(Staging, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(model, out, resume=True, draft=draft, coreml=package)

    interrupt()
    monkeypatch.undo()
    (package / "Data" / "com.apple.CoreML" / "model.mlmodel").write_bytes(b"other")
    assert rule_of(lambda: convert(model, out, resume=True, draft=draft, coreml=package)) == "resume.changed"
    assert rule_of(lambda: convert(model, out, resume=True, draft=draft)) == "resume.changed"
    (package / "Data" / "com.apple.CoreML" / "model.mlmodel").write_bytes(b"model")
    assert convert(model, out, resume=True, draft=draft, coreml=package).resumed
    convert(model, tmp_path / "once.squizd", draft=draft, coreml=package)
    assert out.read_bytes() == (tmp_path / "once.squizd").read_bytes()


def test_packing_is_deterministic_and_leaves_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    one, two = pack_package(Location.parse(package)), pack_package(Location.parse(package))
    assert one.digest == two.digest
    assert bytes(one.view()) == bytes(two.view())
    assert not list(scratch.iterdir())
    one.source.close()
    two.source.close()


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        json.dumps({**MANIFEST, "rootModelIdentifier": "other"}).encode(),
        json.dumps({**MANIFEST, "rootModelIdentifier": ["x"]}).encode(),
        json.dumps({**MANIFEST, "itemInfoEntries": {ROOT: {"path": "com.apple.CoreML/none"}}}).encode(),
        json.dumps({**MANIFEST, "itemInfoEntries": {ROOT: {"path": "../Manifest.json"}}}).encode(),
        json.dumps({**MANIFEST, "itemInfoEntries": {ROOT: {"path": "/etc/passwd"}}}).encode(),
        json.dumps({**MANIFEST, "itemInfoEntries": {ROOT: {"path": 7}}}).encode(),
        json.dumps({**MANIFEST, "itemInfoEntries": {ROOT: {"path": "a\0b"}}}).encode(),
        json.dumps({**MANIFEST, "itemInfoEntries": {ROOT: {"path": "x" * 300}}}).encode(),
        b"[" * 100_000,
        b" " * (1 << 20) + json.dumps(MANIFEST).encode(),
    ],
)
def test_what_is_no_package_is_refused(package: Path, manifest: bytes) -> None:
    (package / "Manifest.json").write_bytes(manifest)
    assert rule_of(lambda: require_package(LocalStore(package))) == "attachments.coreml-package"
    (package / "Manifest.json").unlink()
    assert rule_of(lambda: require_package(LocalStore(package))) == "attachments.coreml-package"


def part_of(data: bytes, **changes: Any) -> Part:
    return replace(Part("u8", len(data), MemorySource(data), where="zip"), **changes)


def zip_of(package: Path, prefix: str) -> bytes:
    path = package.parent / "made.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in files_of(package).items():
            out.writestr(prefix + name, data)
    return path.read_bytes()


def test_archives_with_a_folder_around_the_package_are_taken(package: Path, tmp_path: Path) -> None:
    out = extract_package(part_of(zip_of(package, "Some.mlpackage/")), tmp_path / "cache")
    assert out.name == "Some.mlpackage"
    assert files_of(out) == files_of(package)


def test_the_cache_is_used_again_and_never_left_dirty(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data = zip_of(package, "")
    out = extract_package(part_of(data), cache)
    assert list(cache.iterdir()) == [out]
    mark = out / "Data" / "compiled"
    mark.write_bytes(b"by a user")
    assert extract_package(part_of(data), cache) == out
    assert mark.exists()
    for broken in (data[:-1], data.replace(b"Manifest.json", b"../ifest.json"), zip_of(package / "Data", "")):
        assert rule_of(lambda broken=broken: extract_package(part_of(broken), cache))
        assert list(cache.iterdir()) == [out]


def test_what_lies_in_the_cache_is_compared_with_the_zip(package: Path, tmp_path: Path) -> None:
    part = part_of(zip_of(package, ""))
    out = extract_package(part, tmp_path / "cache")
    wanted = files_of(out)
    largest = max((path for path in out.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damages = (
        lambda: os.truncate(largest, largest.stat().st_size // 2),
        lambda: largest.write_bytes(bytes(largest.stat().st_size)),
        largest.unlink,
    )
    for damage in damages:
        damage()
        assert extract_package(part, tmp_path / "cache") == out
        assert files_of(out) == wanted
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [out.name]


def test_a_package_is_on_the_disk_before_its_name(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.add(os.fstat(fd).st_ino) or real(fd))
    out = extract_package(part_of(zip_of(package, "")), tmp_path / "cache")
    assert {path.stat().st_ino for path in (out, out.parent, *out.rglob("*"))} <= flushed


def test_a_digest_that_does_not_fit_is_noticed(package: Path, tmp_path: Path) -> None:
    part = part_of(zip_of(package, ""), digest="crc32c:0xdeadbeef")
    with pytest.raises(IntegrityError):
        extract_package(part, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_several_extract_at_once(package: Path, tmp_path: Path) -> None:
    data, found = zip_of(package, ""), []

    def extract() -> None:
        found.append(extract_package(part_of(data), tmp_path / "cache"))

    threads = [threading.Thread(target=extract) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert list((tmp_path / "cache").iterdir()) == [found[0]]
    assert files_of(found[0]) == files_of(package)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: Path) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "mine"))
    assert default_cache("coreml") == tmp_path / "mine" / "coreml"
    assert extract_coreml(full).is_relative_to(tmp_path / "mine" / "coreml")
    monkeypatch.delenv("INGOT_CACHE")
    assert default_cache("coreml") == user_cache_path("ingot", appauthor=False) / "coreml"


def test_nothing_to_extract(tmp_path: Path, model: Path) -> None:
    for attempt in (lambda: extract_draft(model, tmp_path / "a.zt"), lambda: extract_coreml(model, tmp_path)):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert caught.value.rule == "attachments.none"


def test_the_command_line(
    tmp_path: Path, model: Path, draft: Path, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "a.squizd")
    arguments = ["convert", str(model), out, "--draft", str(draft), "--coreml", str(package)]
    assert run([*arguments, "--dry-run"]) == 0
    assert "Core ML package" in capsys.readouterr().out
    assert run([*arguments, "--quiet"]) == 0
    back, cache = str(tmp_path / "back.safetensors"), str(tmp_path / "cache")
    assert run(["extract", out, "--draft", back, "--coreml", "--cache", cache, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draft"]["draft_vocab"] == 20
    assert files_of(Path(found["coreml"]["path"])) == files_of(package)
    assert run(["extract", out, "--draft", back]) == 2  # it is there
    assert run(["extract", out, "--draft", back, "--overwrite"]) == 0
    assert run(["extract", out, "--coreml", "--cache", cache]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == found["coreml"]["path"]
    assert run(["extract", out]) == 2
    assert run(["extract", str(model), "--coreml"]) == 2
    assert run(["convert", out, str(tmp_path / "b.zt")]) == 1
    assert "--drop" in capsys.readouterr().err
    assert run(["convert", out, str(tmp_path / "b.zt"), "--drop", "draft", "--drop", "coreml"]) == 0
    assert "dropped as requested: draft" in capsys.readouterr().out


def test_a_draft_head_of_other_bytes_is_refused_on_the_way_out(tmp_path: Path, full: Path) -> None:
    data = bytearray(full.read_bytes())
    values = draft_head()["fc.weight"].tobytes()
    position = bytes(data).index(values)
    data[position] ^= 1
    (tmp_path / "bad.squizd").write_bytes(data)
    with pytest.raises((IntegrityError, FormatError)):
        extract_draft(tmp_path / "bad.squizd", tmp_path / "back.zt")
    assert not (tmp_path / "back.zt").exists()


def test_a_check_of_a_package_writes_none_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may unfold to two hundred times its bytes; they are compared with their checksums as they pass."""
    manifest = {"rootModelIdentifier": "m", "itemInfoEntries": {"m": {"path": "model.mlmodel"}}}
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("Manifest.json", json.dumps(manifest))
        archive.writestr("Data/model.mlmodel", b"model")
        archive.writestr("Data/weights.bin", bytes(range(256)) + bytes(20 << 20))
    sizes: list[int] = []
    monkeypatch.setattr(
        "ingot.artifacts.attachments._package_in",
        lambda store: sizes.extend(store.stat(name).size for name in store.tree()),
    )
    part = Part("u8", len(raw.getvalue()), MemorySource(raw.getvalue()))
    check_package(part)
    assert len(sizes) == 3
    assert sum(sizes) < 1000
    damaged = bytearray(raw.getvalue())
    at = damaged.index(b"Data/weights.bin") + 16 + 100
    damaged[at] ^= 0x55
    with pytest.raises(IngotError):
        check_package(Part("u8", len(damaged), MemorySource(damaged)))
