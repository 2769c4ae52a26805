"""The golden corpus of .wdelta: as its maker makes it; valid files decode as stated, others are refused by rule."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot
from ingot.errors import IngotError

CORPUS = Path(__file__).parent / "wdelta"
VALID, REJECT, DAMAGED = (sorted((CORPUS / part).glob("*.wdelta")) for part in ("valid", "reject", "damaged"))


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_wdelta", Path(__file__).parent / "make_wdelta.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_what_its_maker_makes() -> None:
    made: dict[str, bytes] = maker().corpus()
    found = {str(path.relative_to(CORPUS)): path.read_bytes() for path in CORPUS.rglob("*") if path.is_file()}
    assert sorted(found) == sorted(made)
    assert [name for name, data in made.items() if found[name] != data] == []


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_valid_files_decode_as_stated(path: Path, io: str) -> None:
    expected: dict[str, Any] = json.loads((CORPUS / "expected.json").read_text())[path.stem]
    with ingot.open(path, io=io) as delta:
        assert {name: tensor.numpy().tobytes().hex() for name, tensor in delta.items()} == expected
        assert {name: item["op"] for name, item in delta.metadata["delta"].get("tensors", {}).items()} == dict.fromkeys(
            expected, "apply"
        )
    assert [item for item in ingot.verify(path) if item.level == "error"] == []


@pytest.mark.parametrize("path", REJECT, ids=lambda path: path.stem)
def test_rejected_files_do_not_open(path: Path) -> None:
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    assert caught.value.rule == path.stem.partition("+")[0]
    assert isinstance(caught.value, ValueError)  # as the document says, of versions that are not known too
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", DAMAGED, ids=lambda path: path.stem)
def test_damaged_files_are_found_out(path: Path) -> None:
    rule = path.stem.partition("+")[0]
    assert rule in {item.rule for item in ingot.verify(path) if item.level == "error"}
    if not rule.startswith("wdelta."):
        with ingot.open(path) as delta, pytest.raises(IngotError) as caught:
            delta["x"].numpy()
        assert caught.value.rule == rule


def test_tensors_come_in_the_order_of_their_records() -> None:
    with ingot.open(CORPUS / "valid" / "records-in-reverse.wdelta") as delta:
        assert list(delta) == ["i", "q", "s"]
        assert list(delta.metadata["delta"]["tensors"]) == ["s", "q", "i"]


def test_a_header_with_another_strategy_is_told() -> None:
    notes = [item.rule for item in ingot.verify(CORPUS / "valid" / "mixed-strategies.wdelta")]
    assert "wdelta.mixed-strategies" in notes
