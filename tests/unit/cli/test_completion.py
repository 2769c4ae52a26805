"""Completion in shells: names of commands and options, values of options, names of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from ingot.cli.commands import BRIEFLY
from ingot.cli.main import app


def complete(*words: str) -> list[tuple[str, str]]:
    completion = ShellComplete(app, {}, "ingot", "_INGOT_COMPLETE")
    return [(item.type, item.value) for item in completion.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("con",), "convert"),
        (("--show",), "--show-completion"),
        (("store", "a"), "add"),
        (("convert", "--rec"), "--recipe"),
        (("convert", "--thr"), "--threads"),  # which the short help does not show
        (("convert", "a", "b", "--digest", ""), "sha256"),
        (("lut", "gelu", "--no-p"), "--no-plot"),
    ],
)
def test_names_and_values_are_completed(words: tuple[str, ...], expected: str) -> None:
    assert ("plain", expected) in complete(*words)


@pytest.mark.parametrize(
    "words", [("convert", "mo"), ("convert", "a", "b", "--recipe", "mo"), ("patch", "a", "b", "mo")]
)
def test_text_is_completed_as_the_name_of_a_file(words: tuple[str, ...]) -> None:
    assert complete(*words) == [("file", "mo")]


def test_the_names_of_ingot_s_commands_need_no_import() -> None:
    code = (
        "import sys\n"
        "from click.shell_completion import ShellComplete\n"
        "from ingot.cli.main import app\n"
        "print(*(item.value for item in ShellComplete(app, {}, 'ingot', 'X').get_completions([], '')))\n"
        "assert 'ingot.cli.convert' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(BRIEFLY) <= set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str) -> None:
    result = CliRunner().invoke(app, ["--show-completion", shell])
    assert result.exit_code == 0
    assert f"_INGOT_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_command(tmp_path: Path) -> None:
    program = tmp_path / "ingot"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ingot "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(ingot --show-completion bash)" || exit 1\n'
        "COMP_WORDS=(ingot conv) COMP_CWORD=1\n"
        "_ingot_completion ingot\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "convert\n", "")
