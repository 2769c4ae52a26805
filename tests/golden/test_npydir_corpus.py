"""The golden corpus of Squish directories: in step with its script; values as a reader of NumPy alone has them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import FormatError, IngotError
from ingot.ext.squish.npydir.reader import read_catalog
from ingot.stores.memory import MemoryStore

HERE = Path(__file__).parent
ROOT = HERE / "npydir"
PAGE = HERE.parent.parent / "spec" / "npydir.md"

found = importlib.util.spec_from_file_location("make_npydir", HERE / "make_npydir.py")
assert found is not None
assert found.loader is not None
script = importlib.util.module_from_spec(found)
found.loader.exec_module(script)
VALID: dict[str, dict[str, bytes]] = script.valid()
REJECTED: dict[str, dict[str, bytes]] = script.rejected()


def value(folder: Path, key: str) -> np.ndarray[Any, Any]:
    """A tensor's values, from the tables of the spec page and NumPy alone."""

    def load(suffix: str) -> np.ndarray[Any, Any]:
        return np.load(folder / "tensors" / f"{key}__{suffix}.npy", mmap_mode="r")

    def there(suffix: str) -> bool:
        return (folder / "tensors" / f"{key}__{suffix}.npy").exists()

    ready = (folder / ".squish_int4_ready").exists()
    for suffix in ("q4a", "q4"):
        if there(suffix) and (ready or not there("q")):
            packed = load(suffix)
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).astype(np.float32)
            scales = np.repeat(load("s" + suffix[1:]), codes.shape[1] // load("s" + suffix[1:]).shape[1], 1)
            if suffix == "q4":
                return (scales * (codes - 7)).reshape(load("shape"))
            return (scales * codes + np.repeat(load("z4a"), 4, 1)).reshape(load("shape"))
    if there("q3"):
        bits = np.unpackbits(load("q3"), bitorder="little").reshape(-1, 3)
        codes = (bits @ np.array([1, 2, 4])).reshape(-1, 64).astype(np.float32)
        return (load("s3")[:, None] * (codes - load("z3")[:, None])).reshape(load("shape"))
    if there("pt"):
        return load("pt")
    codes, scales = load("q").astype(np.float32), load("s")
    scales = scales[:, None] if scales.ndim == 1 else np.repeat(scales, codes.shape[1] // scales.shape[1], 1)
    return (codes * scales).reshape(load("shape") if there("shape") else codes.shape)


def test_the_corpus_is_what_its_script_makes() -> None:
    made = {f"{name}/{path}": data for name, files in VALID.items() for path, data in files.items()}
    lying = {
        path.relative_to(ROOT / "valid").as_posix(): path for path in (ROOT / "valid").rglob("*") if path.is_file()
    }
    assert sorted(made) == sorted(lying)
    assert [name for name in made if made[name] != lying[name].read_bytes()] == []


@pytest.mark.parametrize("name", sorted(set(VALID) - {"zst", "nothing"}))
def test_valid_directories_have_the_values_that_numpy_reads(name: str) -> None:
    folder = ROOT / "valid" / name
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {right: left for left, right in manifest.items()} if name == "manifest-by-key" else manifest
    with ingot.open(folder) as checkpoint:
        assert set(checkpoint) == set(names)
        assert checkpoint.format == "npydir"
        for tensor, key in names.items():
            expected, own = value(folder, key), checkpoint[tensor].numpy()
            assert own.shape == expected.shape
            assert np.array_equal(own.astype(np.float32), expected.astype(np.float32))
    assert [finding for finding in ingot.verify(folder) if finding.level == "error"] == []


def test_a_compressed_array_is_read() -> None:
    with ingot.open(ROOT / "valid" / "zst") as one, ingot.open(ROOT / "valid" / "int8-row") as other:
        assert np.array_equal(one["l.q"].numpy(), other["l.q"].numpy())
        assert one.io == "pread"
        part = one["l.q"].parts["packed_weight"]
        assert bytes(part.stored()) == bytes(other["l.q"].parts["packed_weight"].stored())
        back = bytearray(4)
        part.readinto(3, memoryview(back))  # behind where the stream is now
        assert back == bytes(part.stored())[3:7]


def test_nothing_opens() -> None:
    with ingot.open(ROOT / "valid" / "nothing") as checkpoint:
        assert len(checkpoint) == 0


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_rejected_directories_are_refused_by_the_rule_in_their_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(IngotError) as caught:
        read_catalog(MemoryStore(REJECTED[name]))
    assert caught.value.rule == name.partition("+")[0]
    assert caught.value.where
    for path, data in REJECTED[name].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    with pytest.raises(IngotError) as caught:
        ingot.open(tmp_path)
    assert caught.value.rule == name.partition("+")[0]


@pytest.mark.parametrize("what", ["tensors", "tensors/w__pt.npy", "manifest.json"])
def test_links_out_of_the_directory_are_refused(what: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for path, data in script.folder({"w": script.PT}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    ingot.open(folder).close()
    elsewhere.mkdir()
    (folder / what).rename(elsewhere / "moved")
    (folder / what).symlink_to(elsewhere / "moved")
    with pytest.raises(FormatError) as caught:
        ingot.open(folder)
    assert caught.value.rule == "npydir.link"


def test_the_spec_page_lists_exactly_the_rules_that_the_corpus_breaks() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `npydir.")]
    listed = {span for line in lines for span in line.split("|")[1].split("`") if span.startswith("npydir.")}
    broken = {name.partition("+")[0] for name in REJECTED}
    elsewhere = {"link", "manifest-length", "narrowed", "carry", "collision", "empty"}
    elsewhere |= {"unmarked", "other-file", "unused-form"}
    assert listed == broken | {f"npydir.{rule}" for rule in elsewhere}
