"""The list of mutants follows the code, and what runs it would notice if it did not."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def run() -> ModuleType:
    path = Path(__file__).with_name("run.py")
    spec = importlib.util.spec_from_file_location("ingot_mutants_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_text_is_where_the_list_says(run: ModuleType) -> None:
    found = run.mutants()
    assert len(found) >= 78
    assert run.faults(found) == []


@pytest.mark.parametrize(
    "change",
    [
        {"old": "no such text"},
        {"old": "a"},
        {"file": "src/ingot/gone.py"},
        {"tests": ("tests/gone.py",)},
        {"tests": ()},
        {"switch": 1},
    ],
)
def test_an_entry_that_fell_behind_is_told(run: ModuleType, change: dict[str, object]) -> None:
    one = next(mutant for mutant in run.mutants() if not mutant.switch)
    assert len(run.faults([replace(one, **change)])) == 1
    assert run.faults([one, one])
