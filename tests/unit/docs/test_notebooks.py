"""Notebooks of the documents: their cells run in order, in an empty folder, and they are stored without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[3] / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(notebook.read_text("utf-8"))
    assert content["nbformat"] == 4
    return list(content["cells"])


def run_cell(source: str, session: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line if that is an expression, as a notebook shows it."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), session)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), session)


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["adapters-and-deltas", "quantize-and-check"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run_in_order(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "__main__"}
    shown = 0
    for cell in cells(notebook):
        if cell["cell_type"] == "code":
            value = run_cell("".join(cell["source"]), session)
            html = getattr(value, "_repr_html_", None)
            shown += html is not None and "<table" in html()
    assert shown >= 1


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(notebook: Path) -> None:
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
