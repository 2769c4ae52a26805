"""Processes that import nothing from the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ingot
from ingot.core import isolation


def test_flags_of_this_process_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(isolated=0, ignore_environment=1, no_user_site=1)
    monkeypatch.setattr(isolation, "sys", SimpleNamespace(flags=flags, executable=sys.executable))
    assert isolation.isolated_command("ingot.errors", "printable")[:4] == [sys.executable, "-P", "-E", "-s"]


def test_entries_that_mean_the_current_folder_are_left_out() -> None:
    variables = {"PYTHONPATH": os.pathsep.join(["", "/a", ".", "./", "lib", "/b"]), "OTHER": "1"}
    assert isolation.isolated_environment(variables) == {
        "PYTHONPATH": os.pathsep.join(["/a", "lib", "/b"]),
        "OTHER": "1",
    }
    assert isolation.isolated_environment({})["PYTHONPATH"] == ""


@pytest.mark.parametrize("path", ["", ".", os.pathsep])
def test_ingot_is_imported_and_nothing_beside_the_data(tmp_path: Path, path: str) -> None:
    for name in ("msgspec", "numpy", "ingot", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the folder of the data')")
    command = isolation.isolated_command("ingot.core.runtime.memory", "parse_size", "2GiB")
    command[command.index("-c") + 1] += "\nprint(sys.modules['ingot'].__file__, '' in sys.path)"
    variables = isolation.isolated_environment({**os.environ, "PYTHONPATH": path})
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [ingot.__file__, "False"]
