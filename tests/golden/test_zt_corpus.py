"""The golden .zt corpus: in step with its script; valid files read as recorded, the others are refused by name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ingot.errors import IngotError
from ingot.formats.base import Catalog
from ingot.formats.zt.reader import read_catalog
from ingot.model.bytesource import MemorySource

HERE = Path(__file__).parent
ROOT = HERE / "zt"
SPEC_PAGES = HERE.parent.parent / "spec"


def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_zt", HERE / "make_zt.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def stems(kind: str) -> list[str]:
    return sorted(path.name.removesuffix(".zt") for path in (ROOT / kind).glob("*.zt"))


def catalog(kind: str, stem: str) -> Catalog:
    data = (ROOT / kind / f"{stem}.zt").read_bytes()
    return read_catalog(MemorySource(data, stem))


def test_the_corpus_is_what_its_script_makes() -> None:
    made: dict[str, bytes] = script().files()
    found = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in ROOT.rglob("*") if path.is_file()}
    assert sorted(made) == sorted(found)
    assert [name for name in made if made[name] != found[name]] == []


@pytest.mark.parametrize("stem", stems("valid"))
def test_valid_files_read_as_recorded(stem: str) -> None:
    recorded: dict[str, Any] = json.loads((ROOT / "expected.json").read_text())
    assert script().expected((ROOT / "valid" / f"{stem}.zt").read_bytes()) == recorded[stem]


@pytest.mark.parametrize("stem", stems("reject"))
def test_rejected_files_are_refused_by_the_rule_in_their_name(stem: str) -> None:
    with pytest.raises(IngotError) as caught:
        catalog("reject", stem)
    assert caught.value.rule == stem.partition("+")[0]
    assert caught.value.where is not None
    assert caught.value.where.startswith(stem)


@pytest.mark.parametrize("stem", stems("damaged"))
def test_damaged_files_open_and_refuse_to_be_read(stem: str) -> None:
    found = catalog("damaged", stem)
    part = found.tensors["t"].parts["data"]
    with pytest.raises(IngotError) as caught:
        part.view()
    assert caught.value.rule == stem.partition("+")[0]
    with pytest.raises(IngotError) as caught:
        part.readinto(0, memoryview(bytearray(part.nbytes)))
    assert caught.value.rule == stem.partition("+")[0]


@pytest.mark.parametrize("page", ["zt", "cbor"])
def test_the_spec_page_lists_exactly_the_rules_that_the_corpus_breaks(page: str) -> None:
    text = (SPEC_PAGES / f"{page}.md").read_text()
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith(f"| `{page}.")}
    broken = {stem.partition("+")[0] for stem in stems("reject")}
    too_large_for_a_corpus = {"cbor.items"}
    of_container_2 = {"cbor.not-shortest", "cbor.key-order"}  # test_zt2_corpus.py
    of_encoding = {"zt.packed-ratio"}  # tests/unit/formats/zt/test_zt_reader.py
    assert listed - too_large_for_a_corpus - of_container_2 - of_encoding == {
        rule for rule in broken if rule.startswith(f"{page}.")
    }
