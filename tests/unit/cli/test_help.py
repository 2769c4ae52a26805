"""The help of every command at 80 columns: no wider, and no value of an option broken inside a word."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from ingot.cli.commands import GROUP_OF, SHORT_NAMES
from ingot.cli.main import app, run


def commands(group: click.Group, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = [before]
    for name, command in group.commands.items():
        here = (*before, name)
        paths += commands(command, here) if isinstance(command, click.Group) else [here]
    return paths


@pytest.mark.parametrize("path", commands(app), ids=" ".join)
def test_help_fits_the_terminal(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    lines = re.sub(r">=|(?<=\w)<(?=\d)", "", result.stdout).splitlines()  # of `[x>=1]`, of `kl<0.02`
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\w-$", line)]
    assert not [line for line in lines if line.count("<") != line.count(">") or line.count("[") != line.count("]")]


def names_in(line: str) -> list[str]:
    """Return the names of the commands in a line of the list; the text after them begins with a capital letter."""
    match = re.match(r"[a-z0-9, -]*", line[8:])
    return match[0].replace(",", "").split() if match else []


def test_every_command_is_listed_on_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, ["--help"]).stdout.splitlines()
    assert len(lines) <= 40
    assert {*GROUP_OF, *SHORT_NAMES} == set(app.commands)
    groups = [line[:8].strip() for line in lines]
    for name, group in GROUP_OF.items():
        row = next(index for index, line in enumerate(lines) if name in names_in(line))
        assert next(filter(None, reversed(groups[: row + 1]))) == group
    options = groups.index("Options")
    context = click.Context(app, info_name="ingot")
    assert all(any(max(item.opts, key=len) in line for line in lines[options:]) for item in app.get_params(context))


@pytest.mark.parametrize("name", ["convert", "patch", "diff"])
def test_help_fits_a_screen_and_names_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (CliRunner().invoke(app, [name, option]) for option in ("--help", "--help-all"))
    assert short.exit_code == whole.exit_code == 0
    assert len(short.stdout.splitlines()) <= 60
    assert max(map(len, whole.stdout.splitlines())) <= 80
    command = app.commands[name]
    for parameter in command.params:
        flag = max(parameter.opts, key=len)
        assert not flag.startswith("-") or (flag in short.stdout and flag in whole.stdout)
    grouped = [item for item in command.params if getattr(item, "panel", None)]
    assert grouped
    for item in grouped:
        row = re.compile(rf"^  (-\w, )?{max(item.opts, key=len)}\b", re.MULTILINE)
        assert row.search(whole.stdout)
        assert not row.search(short.stdout)
    assert not any(item.hidden for item in grouped)  # completion lists them


def test_convert_s_help_is_that_of_a_common_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(CliRunner().invoke(app, ["convert", "--help"]).stdout.splitlines()) <= 45


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("convret",), "convert"),
        (("store", "ad"), "add"),
        (("convert", "--recip"), "--recipe"),
        (("--debugg",), "--debug"),
        (("recipes", "itn4"), "int4"),
    ],
)
def test_what_may_have_been_meant(words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(words)) == 2
    assert meant in capsys.readouterr().err.split("id you mean")[1].partition("?")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "a"), "missing DST: give it as an argument, or as --output; see `ingot convert --help`"),
        (("patch", "a"), "Missing argument 'DELTAS...'; see `ingot patch --help`"),
        (("eval", "m"), "Missing option '--text'; see `ingot eval --help`"),
        (("convert", "a", "b", "--threads", "x"), "'--threads': 'x' is not a valid integer; see"),
        (("convert", "a", "b", "--threads", "0"), "'--threads': 0 is not in the range x>=1; see"),
        (("convert", "a", "b", "--digest", "md5"), "'md5' is not one of 'crc32c', 'sha256', 'none'; see"),
        (("convert", "a", "b", "--threads"), "'--threads' requires an argument; see `ingot convert --help`"),
        (("lut", "gelu", "--plot=1"), "'--plot' does not take a value; see `ingot lut --help`"),
        (("convert", "a", "b", "c"), "unexpected extra argument (c); see"),
        (("store", "rm", "a"), "Missing argument 'NAME'; see `ingot store rm --help`"),
    ],
)
def test_an_error_of_the_parser_is_one_line_with_the_command(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith("[cli.usage]")


def test_a_panel_is_a_section_of_the_full_help() -> None:
    lines = CliRunner().invoke(app, ["convert", "--help-all"]).stdout.splitlines()
    assert lines.index("Arguments:") < lines.index("Options:") < lines.index("Limits and checks:")
    threads = next(index for index, line in enumerate(lines) if line.startswith("  --threads N"))
    assert lines.index("Limits and checks:") < threads < lines.index("The target:")


@pytest.mark.parametrize(("variable", "has_style"), [("UNUSED", True), ("NO_COLOR", False)])
def test_help_has_style_unless_no_color_is_set(variable: str, has_style: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, "1")
    assert ("\x1b[" in CliRunner().invoke(app, ["seal", "--help"], color=True).stdout) == has_style
    assert "\x1b[" not in CliRunner().invoke(app, ["seal", "--help"]).stdout


def test_special_commands_are_in_groups_and_keep_their_short_names() -> None:
    for words, lines in [
        ("ane plan", "plan"),
        ("ane lut", "lut"),
        ("squish int4", "int4"),
        ("squish drop", "cache drop"),
    ]:
        grouped, short = (CliRunner().invoke(app, [*item.split(), "--help"]) for item in (words, lines))
        assert grouped.exit_code == short.exit_code == 0
        assert grouped.stdout.partition("\n")[2] == short.stdout.partition("\n")[2]
    members = CliRunner().invoke(app, ["ane", "--help"]).stdout
    assert all(f"  {name} " in members for name in ("plan", "kernel", "lut"))
    mistyped = CliRunner().invoke(app, ["squish", "int5"])
    assert mistyped.exit_code == 2
    assert "did you mean 'int4'" in str(mistyped.exception) + mistyped.output
