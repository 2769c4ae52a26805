"""The help of every command at 80 columns: no wider, and no value of an option broken inside a word."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from ingot.cli.commands import GROUP_OF
from ingot.cli.main import app, run


def commands(group: typer.core.TyperGroup, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = [before]
    for name, command in group.commands.items():
        here = (*before, name)
        paths += commands(command, here) if isinstance(command, typer.core.TyperGroup) else [here]
    return paths


GROUP = typer.main.get_command(app)
assert isinstance(GROUP, typer.core.TyperGroup)


@pytest.mark.parametrize("path", commands(GROUP), ids=" ".join)
def test_help_fits_the_terminal(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = CliRunner().invoke(app, [*path, "--help"])
    assert told.exit_code == 0
    lines = re.sub(r">=|(?<=\w)<(?=\d)", "", told.stdout).splitlines()  # of `[x>=1]`, of `kl<0.02`
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.count("<") != line.count(">") or line.count("[") != line.count("]")]


def test_every_command_is_listed_on_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, ["--help"]).stdout.splitlines()
    assert len(lines) <= 40
    assert set(GROUP_OF) == set(GROUP.commands)
    groups = [line[:8].strip() for line in lines]
    for name, group in GROUP_OF.items():
        row = next(index for index, line in enumerate(lines) if line[8:].startswith(f" {name} "))
        assert next(filter(None, reversed(groups[: row + 1]))) == group
    options = groups.index("Options")
    context = typer.Context(GROUP, info_name="ingot")
    assert all(any(max(item.opts, key=len) in line for line in lines[options:]) for item in GROUP.get_params(context))


@pytest.mark.parametrize("name", ["convert", "patch", "diff"])
def test_help_fits_a_screen_and_names_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (CliRunner().invoke(app, [name, option]) for option in ("--help", "--help-all"))
    assert short.exit_code == whole.exit_code == 0
    assert len(short.stdout.splitlines()) <= 60
    assert max(map(len, whole.stdout.splitlines())) <= 80
    command = GROUP.commands[name]
    for parameter in command.params:
        flag = max(parameter.opts, key=len)
        assert not flag.startswith("-") or (flag in short.stdout and flag in whole.stdout)
    hidden = [item for item in command.params if getattr(item, "rich_help_panel", None)]
    assert hidden
    assert all(f"│ {max(item.opts, key=len)} " not in short.stdout.replace("│    ", "│ ") for item in hidden)
    assert not any(item.hidden for item in hidden)  # completion tells of all


def test_convert_s_help_is_that_of_a_common_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(CliRunner().invoke(app, ["convert", "--help"]).stdout.splitlines()) <= 45


@pytest.mark.parametrize(
    ("words", "meant"),
    [(("convret",), "convert"), (("convert", "--recip"), "--recipe"), (("recipes", "itn4"), "int4")],
)
def test_what_may_have_been_meant(words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(words)) == 2
    assert meant in capsys.readouterr().err.split("id you mean")[1].partition("?")[0]
