"""Archives and coded parts of earlier versions: ``make_archives.py`` made them, and each later version opens them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import ingot
from ingot.core.bytes.packed import PACKED

ROOT = Path(__file__).parent / "archives"
EXPECTED = json.loads((ROOT / "expected.json").read_text(encoding="utf-8"))
CODED = [name for name in EXPECTED if name.startswith("packed-")]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in CODED])
def test_an_archive_is_restored(name: str, tmp_path: Path) -> None:
    assert ingot.restore(ROOT / f"{name}.zt", tmp_path / "out").damaged == []
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    digests = {
        file.relative_to(tmp_path / "out").as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    assert digests == EXPECTED[name]
    assert {item.rule for item in ingot.verify(ROOT / f"{name}.zt") if item.level == "error"} == set()


def test_an_archive_that_was_cut_off_is_restored(tmp_path: Path) -> None:
    data = (ROOT / "folder.zt").read_bytes()
    (tmp_path / "cut.zt").write_bytes(data[: len(data) * 2 // 3])
    result = ingot.restore(tmp_path / "cut.zt", tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert 0 < len(files) < len(EXPECTED["folder"])
    for file in files:
        name = file.relative_to(tmp_path / "out").as_posix()
        assert hashlib.sha256(file.read_bytes()).hexdigest() == EXPECTED["folder"][name]
    missing = EXPECTED["folder"].keys() - {file.relative_to(tmp_path / "out").as_posix() for file in files}
    assert all(any(name in line for line in result.damaged) for name in missing)


@pytest.mark.parametrize("name", CODED)
def test_coded_parts_are_decoded(name: str) -> None:
    with ingot.open(ROOT / f"{name}.zt") as opened:
        encodings = {part.encoding for tensor in opened.values() for part in tensor.parts.values()}
        assert PACKED in encodings
        digests = {key: hashlib.sha256(tensor.numpy("f32").tobytes()).hexdigest() for key, tensor in opened.items()}
    assert digests == EXPECTED[name]


def test_the_corpus_has_each_type_of_object() -> None:
    inspected = {}
    for name in ("folder", "tuned"):
        from ingot.inspect.inspect import inspect

        inspected[name] = inspect(ROOT / f"{name}.zt").archive
    assert inspected["folder"].differences
    assert inspected["folder"].duplicate_bytes
    assert inspected["tuned"].base == "base.safetensors"
