"""What the documents' tests share: the blocks of pages, and the demo's model where the tour says it is."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ingot

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    """Import a script of tools/."""
    spec = importlib.util.spec_from_file_location(f"ingot_tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(ROOT / "tools"))  # scripts import their neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="session")
def check_docs() -> ModuleType:
    return tool("check_docs")


@pytest.fixture(scope="session")
def bench_table() -> ModuleType:
    return tool("bench_table")


@pytest.fixture(scope="session")
def readme_figures() -> ModuleType:
    return tool("readme_figures")


@pytest.fixture(scope="session")
def readme(check_docs: ModuleType) -> Any:
    return check_docs.read(ROOT / "README.md")


@pytest.fixture(scope="session")
def tour_page(check_docs: ModuleType) -> Any:
    return check_docs.read(ROOT / "docs" / "tour.md")


@pytest.fixture
def after_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder as ``make demo`` leaves it, as far as the documents use it."""
    data = Path(ingot.__file__).parent / "demo" / "data"
    shutil.copytree(data, tmp_path / "ingot-demo" / "original", ignore=shutil.ignore_patterns("__*"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
