"""Decoders written from the spec pages alone against Ingot: random cases of every codec; `make cases` runs more."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .cases import CASES
from .run import run


@pytest.mark.parametrize("name", CASES)
def test_ingot_decodes_as_the_spec_says(name: str) -> None:
    compared, wrong = run(name, 25, 1)
    assert compared >= 8
    assert not wrong


@pytest.mark.parametrize("name", ["common", "weights", "exact", "deltas", "textures"])
def test_oracles_know_nothing_of_ingot(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) if not node.level]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    standard = {"__future__", "collections.abc", "dataclasses", "math", "statistics", "typing"}
    assert set(modules) <= standard | {"astc_encoder", "numpy"}
