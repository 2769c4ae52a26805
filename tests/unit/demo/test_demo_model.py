"""The demo's model: part of the source tree, and of a distribution of its own where the wheel is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from ingot.cli.main import run
from ingot.demo.run import COMPANIONS, MODEL, _model_files
from tests.support.paths import DEMO_DATA, ROOT


@pytest.fixture
def wheel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel without the folder that it excludes."""
    monkeypatch.setitem(sys.modules, "ingot.demo.data", None)
    monkeypatch.delitem(sys.modules, "ingot_demo", raising=False)


@pytest.mark.usefixtures("wheel_alone")
def test_the_extra_is_named_where_the_model_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ingot_demo", None)
    assert run(["demo", "--out", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert "pip install 'ingot[demo]'" in " ".join(error.split())
    assert not list((tmp_path / "out").rglob("*.*"))


@pytest.mark.usefixtures("wheel_alone")
def test_the_model_of_the_distribution_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ingot_demo").mkdir()
    (tmp_path / "ingot_demo" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert _model_files() == files("ingot_demo")


@pytest.mark.slow
def test_the_distribution_has_the_files_of_the_source_tree(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    shutil.copytree(ROOT / "demo", tmp_path / "demo", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copytree(
        DEMO_DATA, tmp_path / "src" / "ingot" / "demo" / "data", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-compile", "--no-build-isolation", "--target", str(tmp_path / "site")]
    done = subprocess.run([*command, *options, str(tmp_path / "demo")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed = tmp_path / "site" / "ingot_demo"
    names = {MODEL, *COMPANIONS, "__init__.py"}
    assert {path.name for path in installed.iterdir()} == names
    assert all((installed / name).read_bytes() == (DEMO_DATA / name).read_bytes() for name in names)
