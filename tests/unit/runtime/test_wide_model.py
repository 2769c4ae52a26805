"""The trainer of the wider model: it reads no held-out text, and its columns are those that it is for."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ingot
from ingot.runtime.loading.options import Protocol

ROOT = Path(__file__).parents[3]
MODELS = ROOT.parent / "shared" / "models"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "train_wide_model", raising=False)
    return importlib.import_module("train_wide_model")


def test_no_paragraph_is_read_twice_or_held_out(trainer: ModuleType, tmp_path: Path) -> None:
    known = "the quick brown fox jumps over the lazy dog and sleeps"
    (tmp_path / "a.md").write_text(f"first one\n\nIt says: {known.title()}!\n\nlast one\n")
    (tmp_path / "b.txt").write_text("first one\n\nsecond one\n")
    (tmp_path / "c.bin").write_text("no text\n")
    found = "".join(trainer.documents(trainer.files_of([tmp_path]), f"Before.\n\n{known}", 1000))
    assert found.count("first one") == found.count("second one") == found.count("last one") == 1
    assert "fox" not in found.lower()
    assert "no text" not in found
    first, every = ("".join(trainer.documents(trainer.files_of([tmp_path]), "", most)) for most in (1, 1000))
    assert len(first) < len(every)


@pytest.mark.slow
@pytest.mark.models
def test_a_step_makes_a_model_of_the_right_shapes(trainer: ModuleType, tmp_path: Path) -> None:
    text = MODELS / "heldout_code.txt"
    trainer.main([str(MODELS / "base"), str(tmp_path / "wide"), "--text", str(text), "--steps", "2", "--batch", "1"])
    assert json.loads((tmp_path / "wide" / "training.json").read_text())["steps"] == 2
    with ingot.open(tmp_path / "wide") as checkpoint:
        assert sum(tensor.size for tensor in checkpoint.values()) < 25_000_000
        assert {tensor.shape[-1] % 256 for tensor in checkpoint.values()} == {0}
    found = ingot.evaluate(tmp_path / "wide", text, protocol=Protocol(window=64, sequences=1))
    assert found.perplexity < 6000
