"""The checker of style finds short modules and joined assignments, and lets neither number rise."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import ModuleType

import pytest

LONG = "\n" * 40


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without a file of Ingot, and without a hit allowed."""
    (tmp_path / "src" / "ingot" / "core").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "style_allowed.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "code",
    [
        "a, b = 1, 2",
        "a, b, c = x, y, f(x)",
        "(a, b) = (1, 2)",
        "self.a, self.b = a, b",
        "a, (b, c) = 1, f()",
        "def f():\n    if x:\n        a, b = 1, 2",
        "a, b = b, 2",
    ],
)
def test_joined_assignments_are_found(check_style: ModuleType, code: str) -> None:
    (found,) = check_style.joined_assignments(ast.parse(code))
    assert "=" in ast.unparse(found)


@pytest.mark.parametrize(
    "code",
    [
        "a, b = b, a",
        "a, b = f()",
        "a, b = x",
        "a, *b = 1, 2",
        "a, b = *c, 1",
        "A, B = ALL = (1, 2)",
        'A, B = 1, 2\n"""Both are numbers."""',
        "a, b = 1, a + 1",
        "self.a, b = 1, self.a",
        "items[0], b = 1, items[0]",
        "for a, b in x: pass",
        "a = 1, 2",
    ],
)
def test_single_statements_are_not_found(check_style: ModuleType, code: str) -> None:
    assert not list(check_style.joined_assignments(ast.parse(code)))


@pytest.mark.parametrize(
    ("name", "lines", "expected"),
    [
        ("core/short.py", 39, True),
        ("core/long.py", 40, False),
        ("core/__init__.py", 1, False),
        ("torch.py", 1, False),
        ("core/torch.py", 1, True),
    ],
)
def test_short_modules_are_found(project: Path, check_style: ModuleType, name: str, lines: int, expected: bool) -> None:
    path = project / "src" / "ingot" / name
    path.write_text("x = 1\n" * lines)
    assert [hit.type for hit in check_style.hits_of(path, project)] == ["modules"] * expected


def test_numbers_may_only_fall(project: Path, check_style: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    path, allowed = project / "src" / "ingot" / "core" / "a.py", project / "tools" / "style_allowed.json"
    path.write_text("a, b = 1, 2\n" + LONG)
    assert check_style.main([], project) == 1
    assert "src/ingot/core: 1 assignments, 0 allowed" in capsys.readouterr().out
    assert check_style.main(["--write"], project) == 1
    allowed.write_text(json.dumps({"src/ingot/model": {"assignments": 1, "modules": 0}}))
    assert check_style.main(["--write"], project) == 0  # a file has moved to another package
    assert check_style.main([], project) == 0
    path.write_text("a = 1\n" + LONG)
    assert check_style.main([], project) == 0
    assert check_style.main(["--write"], project) == 0
    assert json.loads(allowed.read_text()) == {}
    assert check_style.main([str(path)], project) == 0
    assert capsys.readouterr().out.endswith("0 hits\n")


def test_the_project_itself_passes(check_style: ModuleType) -> None:
    assert check_style.main([]) == 0
