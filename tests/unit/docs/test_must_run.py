"""``make`` targets that test with a peer fail where they test nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def ran(folder: Path, *options: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode


def test_where_tests_must_run_it_is_an_error_that_all_are_skipped(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("import pytest\n\n\n@pytest.mark.skip\ndef test_it():\n    pass\n")
    assert ran(tmp_path, "--must-run") == 1
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    assert ran(tmp_path, "--must-run") == 0


def test_of_many_cases_one_in_some_is_left(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    lines = [
        "import pytest",
        "",
        "@pytest.mark.parametrize('n', range(100))",
        "def test_many(n):",
        "    print('case', n)",
    ]
    (tmp_path / "test_it.py").write_text("\n".join([*lines, "", "def test_one():", "    pass", ""]))

    def passed(*options: str) -> int:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)]
        told = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True).stdout
        return int(re.findall(r"(\d+) passed", told)[-1])

    assert passed() == 101
    assert 10 < passed("--one-in", "4") < 50
    assert passed("--one-in", "1000000") == 2


def test_targets_that_name_a_peer_must_run() -> None:
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    named = [line for line in lines if re.search(r"INGOT_[A-Z_]+=.*\$\(PYTEST\)", line)]
    assert len(named) >= 3
    assert [line for line in named if "--must-run" not in line] == []
