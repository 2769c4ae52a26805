"""The command line in odd surroundings: narrow encodings, pipes that close or break, a line that does not parse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest

import ingot
from ingot.cli import main
from ingot.cli.commands import COMMANDS

Shell = Callable[..., subprocess.CompletedProcess[bytes]]
INGOT = f'"{sys.executable}" -m ingot.cli.main'


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    ingot.save(tmp_path / "uni.zt", {"ü😀\n\x1b[31m": np.ones((3, 4), np.float32)})
    ingot.save(tmp_path / "other.zt", {"ü😀\n\x1b[31m": np.zeros((3, 4), np.float32)})

    def call(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        line = line.replace("ingot ", f"{INGOT} ")
        return subprocess.run(
            ["/bin/bash", "-o", "pipefail", "-c", line],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            check=False,
        )

    return call


@pytest.mark.parametrize(
    ("line", "encoding"),
    [
        ("inspect uni.zt", "ascii"),
        ("inspect uni.zt", "latin-1"),
        ("compare uni.zt uni.zt", "ascii"),
        ("verify uni.zt", "ascii"),
        ("convert uni.zt ü😀.zt --overwrite", "latin-1"),
        ("convert uni.zt ü😀.zt --overwrite", "utf-8"),
        ("recipes", "ascii"),
    ],
)
def test_any_encoding_of_the_terminal(shell: Shell, encoding: str, line: str) -> None:
    plain = shell(f"ingot {line}", PYTHONIOENCODING=encoding)
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert b"\x1b" not in plain.stdout
    data = shell(f"ingot {line} --json", PYTHONIOENCODING=encoding)
    assert data.returncode == 0
    text = json.dumps(json.loads(data.stdout.decode(encoding)), ensure_ascii=False)
    assert "\\U0001f600" not in text


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ingot inspect uni.zt | true", 0),
        ("ingot inspect uni.zt --json | true", 0),
        ("ingot formats | true", 0),
        ("ingot compare uni.zt uni.zt | true", 0),
        ("ingot compare uni.zt other.zt | true", 1),  # the answer does not depend on who reads
        ("ingot compare uni.zt other.zt --json | true", 1),
        ("ingot inspect uni.zt >&-", 0),
        ("ingot inspect gone.zt 2>&-", 2),
    ],
)
def test_readers_that_leave(shell: Shell, line: str, code: int) -> None:
    result = shell(line)
    assert (result.returncode, result.stderr, result.stdout) == (code, b"", b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize(
    ("line", "code", "rule"),
    [
        ("inspect uni.zt", 1, "store.disk-full"),
        ("inspect uni.zt --json", 1, "store.disk-full"),
        ("compare uni.zt uni.zt --json", 1, "store.disk-full"),
        ("convert uni.zt new.safetensors", 1, "store.disk-full"),
        ("convert uni.zt new.safetensors --json", 1, "store.disk-full"),
        ("recipes int4", 1, "store.disk-full"),
        ("formats", 1, "store.disk-full"),
        ("convert --help", 1, "store.disk-full"),
        ("--help", 1, "store.disk-full"),
        ("--version", 1, "store.disk-full"),
        ("inspect gone.zt --json", 2, "open.missing"),  # the first error is the one that counts
    ],
)
def test_output_on_a_full_disk_is_one_line(shell: Shell, tmp_path: Path, line: str, code: int, rule: str) -> None:
    result = shell(f"ingot {line} > /dev/full")
    assert (result.returncode, result.stdout) == (code, b"")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.rstrip().endswith(f"[{rule}]".encode())
    assert shell(f"ingot {line} > /dev/full 2> /dev/full").returncode == (2 if line.startswith("convert uni") else code)
    assert (tmp_path / "new.safetensors").exists() == line.startswith("convert uni")


def test_json_and_text_disguise_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C1 controls, bidirectional marks and invisible characters are escapes, and JSON still has the names."""
    monkeypatch.chdir(tmp_path)
    hidden = "\x7f\x85\x9b\x9d\x9c\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\U000e0041"
    name, file = f"layer.0{hidden}.weight", f"file{hidden}.zt"
    ingot.save(file, {name: np.ones((4, 4), np.float32)}, {f"key{hidden}": f"value{hidden}"})
    for line in (
        ["inspect", file],
        ["verify", file],
        ["compare", file, file],
        ["convert", file, f"{file}.safetensors", "--overwrite"],
        ["inspect", f"gone{hidden}"],
    ):
        for options in ([], ["--json"]):
            main.run([*line, *options])
            printed = capsys.readouterr()
            assert not set(hidden) & set(printed.out + printed.err)
    main.run(["inspect", file, "--json"])
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["tensors"]] == [name]


def test_a_reader_who_leaves_early_gets_all_work_done(shell: Shell, tmp_path: Path) -> None:
    result = shell("ingot convert uni.zt early.safetensors | true")
    assert (result.returncode, result.stderr) == (0, b"")
    assert ingot.open(tmp_path / "early.safetensors")


@pytest.mark.parametrize(
    "line", ["ingot inspect", "ingot nothing", "ingot inspect uni.zt --no-such", "ingot inspect ''"]
)
def test_a_wrong_command_line_is_one_line(shell: Shell, line: str) -> None:
    result = shell(line)
    assert (result.returncode, result.stdout) == (2, b"")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.rstrip().endswith(b"]")


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main.signal, "signal", lambda *handler: None)
    monkeypatch.setattr(main, "run", lambda: warnings.warn("two\nlines \x1b[31m", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            main.main()
    assert capsys.readouterr().err == "warning: two lines \\x1b[31m\n"


@pytest.mark.parametrize(
    ("line", "code", "rule"),
    [
        ("inspect gone.zt --json", 2, "open.missing"),
        ("inspect uni.zt --no-such --json", 2, "cli.usage"),
        ("convert uni.zt out.zt --recipe nope --json", 2, "recipe.unknown"),
    ],
)
def test_an_error_is_json_where_json_was_asked_for(shell: Shell, line: str, code: int, rule: str) -> None:
    result = shell(f"ingot {line}")
    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["exit_code"], error["rule"]) == (code, code, rule)
    assert result.stderr.decode().strip().endswith(f"[{rule}]")


@pytest.mark.parametrize("line", ["cache", "store"])
def test_a_bare_command_shows_its_help_and_no_error(shell: Shell, line: str) -> None:
    result = shell(f"ingot {line}")
    assert b"Usage: " in result.stdout
    assert (result.returncode, result.stderr) == (2, b"")


def test_ingot_alone_is_no_error(shell: Shell) -> None:
    result = shell("ingot ")  # the space tells the fixture that a command follows
    assert result.stdout
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (EOFError("short"), 1, "EOFError: short")],
)
def test_an_exception_that_click_handles_itself_is_one_line(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(COMMANDS._loaded, "doctor", click.Command("doctor", callback=fail))
    assert main.run(["doctor"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
