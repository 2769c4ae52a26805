"""The golden .squizd corpus: in step with its script; valid files read as recorded, the others are refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.ext.squizd.reader import read_catalog
from ingot.model.bytesource import MemorySource

HERE = Path(__file__).parent
ROOT = HERE / "squizd"
PAGE = HERE.parent.parent / "spec" / "squizd.md"
# A million blocks make no small file; a unit test has them.
TOO_LARGE = {"squizd.too-many-blocks"}
NOTES = {"squizd.no-directory", "squizd.masks-apart"}
REMARKS = {
    "squizd.masks-apart",
    "squizd.mask-order",
    "squizd.no-directory",
    "squizd.between",
    "squizd.trailing-bytes",
}
PACKED = {"f6_e2m3fn", "f6_e3m2fn", "f4_e2m1fn"}
# Verify looks into what Ingot can read; an empty file is of no format.
NOT_VERIFIED = {
    "squizd.sparse-without-directory",
    "squizd.sparse-ambiguous",
    "squizd.sparse-ambiguous+orders",
    "squizd.tca-ambiguous",
    "squizd.magic+empty",
}


def stems(kind: str) -> list[str]:
    return sorted(path.name.removesuffix(".squizd") for path in (ROOT / kind).glob("*.squizd"))


# Files that are read and not written so: without names, with odd fields, with layers that no name has.
ODD = {
    stem for stem in stems("valid") if any(word in stem for word in ("nameless", "note-", "toy", "layer", "entries-"))
}
ODD = ODD - {"sparse-layers"} | {"crc-of-zeros", "any-arch-id", "scale-offset-0", "int4-empty"}


def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_squizd", HERE / "make_squizd.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def path_of(kind: str, stem: str) -> Path:
    return ROOT / kind / f"{stem}.squizd"


def test_the_corpus_is_what_its_script_makes() -> None:
    made: dict[str, bytes] = script().files()
    found = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in ROOT.rglob("*") if path.is_file()}
    assert sorted(made) == sorted(found)
    assert [name for name in made if made[name] != found[name]] == []
    assert max(map(len, made.values())) < 20_000 or max(made, key=lambda name: len(made[name])) == "expected.json"


@pytest.mark.parametrize("stem", stems("valid"))
def test_valid_files_read_as_recorded(stem: str) -> None:
    recorded: dict[str, Any] = json.loads((ROOT / "expected.json").read_text())
    assert script().expected(path_of("valid", stem).read_bytes()) == recorded[stem]


@pytest.mark.parametrize("stem", stems("valid"))
def test_valid_files_verify_and_give_weights(stem: str) -> None:
    """Nothing but the rule in the name of a ``note-`` file is told; strictly it is an error if the document has it."""
    expected = {stem.removeprefix("note-").partition("+")[0]} if stem.startswith("note-") else set[str]()
    expected |= {"squizd.no-directory"} if "nameless" in stem or stem.startswith("toy") else set()
    expected |= {"squizd.unused-sparsity-crc"} if stem in ("toy", "toy-usual-names") else set()
    expected -= {"squizd.no-directory"} if stem == "eagle-nameless" else set()
    without = any(word in stem for word in ("nameless", "digests-none", "toy"))
    unread = {"part.no-digest", "draft.nameless"} if without else set[str]()
    unread |= set() if stem == "manifest-digest" else {"format.no-manifest-digest"}
    for strict in (False, True):
        findings = ingot.verify(path_of("valid", stem), strict=strict)
        assert {item.rule for item in findings} - unread == expected
        for item in (item for item in findings if item.rule in expected):
            assert item.level == ("error" if strict and item.rule not in REMARKS else "note")
    with ingot.open(path_of("valid", stem)) as checkpoint:
        for tensor in (tensor for tensor in checkpoint.values() if tensor.dtype not in PACKED):
            assert tensor.numpy().shape == tensor.shape


@cache
def sealed() -> dict[str, bytes]:
    """The valid files with the digest that the writer adds; those of the corpus are of before it was written."""
    made: dict[str, bytes] = script().valid(sealed=True)
    return made


@pytest.mark.parametrize("stem", sorted(set(stems("valid")) - ODD))
def test_the_writer_gives_the_bytes_of_the_independent_packer(stem: str, tmp_path: Path) -> None:
    """Conversion to .squizd moves every part; where a file is laid out as the page says, nothing changes at all."""
    digest = {"digests-sha256": "sha256", "digests-none": None}.get(stem, "crc32c")
    compact = "full" not in stem
    report = ingot.convert(path_of("valid", stem), tmp_path / "out.squizd", digest=digest, prune_compact=compact)
    assert report.actions.keys() <= {"moved"}
    assert (tmp_path / "out.squizd").read_bytes() == sealed()[stem]


def test_the_toy_example_yields_its_weights() -> None:
    """Appendix A: header as printed, its wrong CRC included; two INT4 matrices with one scale each."""
    codes = script().codes(8, 16, 4).astype(np.float32)
    with ingot.open(path_of("valid", "toy")) as checkpoint:
        assert list(checkpoint) == ["layers.0.0", "layers.1.0"]
        assert np.array_equal(checkpoint["layers.0.0"].numpy(), codes * np.float32(0.5))
        assert np.array_equal(checkpoint["layers.1.0"].numpy(), (codes + 1) * np.float32(0.25))
    with ingot.open(path_of("valid", "toy-usual-names")) as checkpoint:
        assert list(checkpoint) == ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    head = path_of("valid", "toy").read_bytes()[:320]
    assert head[:26].hex(" ") == "53 51 5a 44 01 00 04 00 00 00 02 00 00 00 5a 2b 00 00 00 00 00 00 00 00 00 00"
    assert head[26:256] == bytes(230)


@pytest.mark.parametrize("stem", stems("reject"))
def test_rejected_files_are_refused_by_the_rule_in_their_name(stem: str) -> None:
    """By the reader, and as the one error that ``verify`` reports."""
    with pytest.raises(IngotError) as caught:
        read_catalog(MemorySource(path_of("reject", stem).read_bytes(), stem))
    assert caught.value.rule == stem.partition("+")[0]
    assert caught.value.where is not None
    assert caught.value.where.startswith(stem)
    assert "\n" not in str(caught.value)
    if stem not in NOT_VERIFIED:
        findings = ingot.verify(path_of("reject", stem))
        assert [(item.level, item.rule) for item in findings] == [("error", stem.partition("+")[0])]


@pytest.mark.parametrize("stem", stems("damaged"))
def test_damaged_files_open_and_verify_finds_the_damage(stem: str) -> None:
    ingot.open(path_of("damaged", stem)).close()
    for io in ("pread", "mmap"):
        errors = {item.rule for item in ingot.verify(path_of("damaged", stem), io=io) if item.level == "error"}
        assert stem.partition("+")[0] in errors


def test_the_spec_page_lists_exactly_the_rules_that_the_corpus_breaks() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `squizd.")]
    listed = {rule for row in rows for rule in re.findall(r"`(squizd\.[a-z0-9-]+)`", row)}
    broken = {stem.partition("+")[0] for stem in stems("reject")}
    assert listed - TOO_LARGE == {rule for rule in broken if rule.startswith("squizd.")}
    told = {stem.removeprefix("note-").partition("+")[0] for stem in stems("valid") if stem.startswith("note-")}
    text = PAGE.read_text()
    paragraph = text[text.index("Remarks: allowed, listed by `verify`") : text.index("Refused only by the writer")]
    remarked = paragraph[paragraph.index("Reported, and not an error") :]
    assert set(re.findall(r"`(squizd\.[a-z-]+)`", remarked)) == REMARKS
    assert told | NOTES == set(re.findall(r"`(squizd\.[a-z-]+)`", paragraph))
    paragraph = text[text.index("Checked when scales are read") : text.index("Remarks: allowed, listed by `verify`")]
    damaged = {stem.partition("+")[0] for stem in stems("damaged")}
    assert set(re.findall(r"`((?:squizd|part)\.[a-z-]+)`", paragraph)) <= damaged
