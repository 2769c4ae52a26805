"""Ingot against the references of its codecs: random tensors of every codec; `make cases` runs more."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT

from .cases import CASES
from .run import run

REFERENCES = ROOT / "tests" / "support" / "reference"


@pytest.mark.parametrize("name", CASES)
def test_ingot_decodes_as_the_spec_says(name: str) -> None:
    compared, wrong = run(name, 25, 1)
    assert compared >= 8
    assert not wrong


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) if not node.level}
    return modules | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("name", ["common", "weights", "exact", "deltas", "textures"])
def test_oracles_know_references_and_nothing_of_ingot(name: str) -> None:
    standard = {"__future__", "collections.abc", "dataclasses", "math", "statistics", "typing"}
    allowed = standard | {"astc_encoder", "numpy", "tests.support.reference"}
    assert imported(Path(__file__).parent / f"{name}.py") <= allowed


@pytest.mark.parametrize("path", sorted(REFERENCES.glob("*.py")), ids=lambda path: path.stem)
def test_references_know_no_codec_and_no_kernel(path: Path) -> None:
    ours = {module for module in imported(path) if module.partition(".")[0] == "ingot"}
    assert ours <= {
        "ingot.core.numeric.dtypes",
        "ingot.core.numeric.floats",
        "ingot.codecs.blocks.grids",
        "ingot.model.tensor",
    }
