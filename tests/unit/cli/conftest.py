"""What the tests of commands share: a command run here, not in a process of its own, which starts for half a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ingot.cli.main import run as run_command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """Run a command in ``tmp_path``, and return what it printed; it must end with ``code``."""

    def call(*arguments: str, code: int = 0) -> CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        found = run_command(list(arguments))
        printed = capsys.readouterr()
        assert found == code, printed.out + printed.err
        return CompletedProcess(arguments, found, printed.out, printed.err)

    return call
