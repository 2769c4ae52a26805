"""The check of wheels refuses what is too large, and what users do not need."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "tools" / "check_wheel.py"
TESTING = ROOT / "src" / "ingot" / "testing"
NEEDED = {"ingot/__init__.py": b"", "ingot/testing/codecs.py": b"", "ingot-0.1.0.dist-info/METADATA": b""}


def check(folder: Path, entries: dict[str, bytes]) -> subprocess.CompletedProcess[str]:
    wheel = folder / "ingot-0.1.0-cp312-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return subprocess.run([sys.executable, str(SCRIPT), str(wheel)], capture_output=True, text=True, check=False)


def test_a_small_wheel_of_the_package_passes(tmp_path: Path) -> None:
    done = check(tmp_path, NEEDED)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 entries" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "ingot/demo/data/model.safetensors",
        "ingot/testing/web.py",
        "ingot/testing/reference/affine.py",
        "tests/support/web.py",
        "tests/__init__.py",
        "ingot_demo/model.safetensors",
        "tools/check_docs.py",
        "ingot.py",
    ],
)
def test_a_wheel_with_an_unwanted_file_is_refused(tmp_path: Path, name: str) -> None:
    done = check(tmp_path, {**NEEDED, name: b""})
    assert done.returncode == 1
    assert f"whl: {name}: " in done.stdout


@pytest.mark.parametrize(("size", "code"), [(4_990_000, 0), (5_000_000, 1)])
def test_a_wheel_of_more_than_five_megabytes_is_refused(tmp_path: Path, size: int, code: int) -> None:
    done = check(tmp_path, {**NEEDED, "ingot/_native.abi3.so": bytes(size)})
    assert done.returncode == code
    assert ("at most 5,000,000 are allowed" in done.stdout) is bool(code)


def test_what_ships_for_authors_is_what_the_suites_import() -> None:
    allowed = {"__init__.py", "codecs.py", "encoding.py", "formats.py", "stores.py", "values.py"}
    assert {path.relative_to(TESTING).as_posix() for path in TESTING.rglob("*.py")} == allowed
    imported = {"codecs", "formats", "stores"}
    for suite in sorted(TESTING.glob("*.py")):
        for node in ast.walk(ast.parse(suite.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                assert not module.startswith(("tests", "hypothesis")), (suite, module)
                imported |= {module.rpartition(".")[2]} if module.startswith("ingot.testing.") else set()
    assert {f"{name}.py" for name in imported} | {"__init__.py"} == allowed


def test_nothing_else_of_the_package_imports_the_suites() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        if TESTING not in path.parents:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
                assert not [name for name in names if name.startswith(("ingot.testing", "tests"))], path
