"""Options of commands and keywords of Python's functions have equal names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest

import ingot
from ingot.cli.commands import COMMANDS
from ingot.cli.main import run
from ingot.core.option_calls import keywords
from ingot.core.options import OUT, OUTPUT, about, about_of, options_of, takes
from ingot.errors import UsageError
from ingot.library.library import Library
from ingot.runtime.loading.options import Loading, Measures, Protocol

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantize": ingot.quantize,
    "convert": ingot.convert,
    "run-plan": ingot.execute,
    "calibrate": ingot.calibrate,
    "verify": ingot.verify,
    "seal": ingot.seal,
    "compare": ingot.compare,
    "report": ingot.report,
    "diff": ingot.diff,
    "patch": ingot.patch,
    "merge": ingot.merge,
    "adapter convert": ingot.convert_adapter,
    "adapter extract": ingot.extract_adapter,
    "plan": ingot.plan,
}
DISPLAY = {"help", "help_all", "json", "quiet"}
ONLY_COMMANDS = {
    "quantize": {"dry_run"},
    "convert": {"dry_run", "plan_out"},
    "compare": {"top", "delta"},
    "diff": {"tensors"},
    "plan": {"tensors", "all", "suggest", "max_error", "overwrite"},
}
"""Options that only decide what a command prints, or that another function of Python has."""


def command(words: str) -> click.Command:
    first, *inner = words.split()
    item = COMMANDS[first]
    for name in inner:
        assert isinstance(item, click.Group)
        item = item.commands[name]
    return item


def long_names(item: click.Command) -> Iterator[str]:
    for parameter in item.params:
        if isinstance(parameter, click.Option):
            yield from (flag.lstrip("-").replace("-", "_") for flag in parameter.opts if flag.startswith("--"))


def accepted(function: Callable[..., Any]) -> set[str]:
    struct = function.__dict__["options"]
    return {name for item in options_of(struct) for name in keywords(item.name, about_of(item))}


@pytest.mark.parametrize("words", FUNCTIONS)
def test_a_function_takes_every_option_of_its_command(words: str) -> None:
    names = {f"{name}_" if name in ("for", "from") else name for name in long_names(command(words))}
    assert names - accepted(FUNCTIONS[words]) - DISPLAY == ONLY_COMMANDS.get(words, set())


def test_evaluate_takes_every_option_of_eval(tmp_path: Path) -> None:
    fields = {
        name
        for struct in (Protocol, Loading, Measures)
        for item in options_of(struct)
        for name in keywords(item.name, about_of(item))
    }
    assert set(long_names(command("eval"))) - fields - DISPLAY == {"text", "reference"}
    for options, expected in [({"windoww": 3}, "did you mean 'window'"), ({"window": "long"}, "window to be")]:
        pytest.importorskip("torch")
        with pytest.raises(UsageError, match=expected) as error:
            ingot.evaluate(tmp_path, tmp_path / "text.txt", **options)
        assert error.value.rule == "eval.option"


@dataclass(frozen=True)
class Toy:
    """Options of a toy."""

    src: str = field(metadata=about("Source."))
    dst: str = field(metadata=about("Result.", *OUTPUT, aliases=OUT))
    _: KW_ONLY
    runtime: str | None = field(default=None, metadata=about("Program.", "--for"))
    force: bool = field(default=False, metadata=about("Force."))
    rate: float | None = field(default=None, metadata=about("Rate."))
    depth: int | None = field(default=None, metadata=about("Depth.", minimum=1))
    max_ram: int | str | None = field(default=None, metadata=about("Memory.", size=True))
    names: Sequence[str] = field(default=(), metadata=about("Names."))
    quiet: bool = field(default=False, metadata=about("Only Python.", "--silent", command=False))


@takes(Toy, "toy")
def play(options: Toy) -> Toy:
    """Return the options."""
    return options


def test_keywords_are_those_of_the_field_and_of_the_command_line() -> None:
    expected = Toy("a", "b", runtime="vllm")
    for name in ("dst", "output", "out"):
        assert play("a", for_="vllm", **{name: "b"}) == expected
    assert play("a", "b", runtime="vllm") == play(expected) == expected
    with pytest.raises(UsageError, match="unknown option 'silent'"):
        play("a", "b", silent=True)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, r"expected play\(src, dst, ...\), found no src and no dst"),
        (("a",), {}, "found no dst"),
        (("a", "b", "c"), {}, "at most 2 arguments by position, found 3"),
        (("a", "b"), {"output": "c"}, "got 'dst' twice"),
        (("a", "b"), {"dest": "c"}, "unknown option 'dest' of toy .did you mean 'dst'"),
        ((3, "b"), {}, "expected src to be text, found 3"),
        (("a", "b"), {"force": "no"}, "expected force to be True or False, found 'no'"),
        (("a", "b"), {"rate": True}, "expected rate to be a number or None, found True"),
        (("a", "b"), {"depth": 1.5}, "expected depth to be an integer or None, found 1.5"),
        (("a", "b"), {"depth": 0}, "expected depth of at least 1, found 0"),
        (("a", "b"), {"max_ram": "much"}, "max_ram: expected a size such as 2GiB"),
        (("a", "b"), {"names": "model"}, "expected names to be a list of texts, found 'model'"),
    ],
)
def test_an_error_names_the_argument(args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        play(*args, **options)


def test_an_object_of_options_is_checked_too() -> None:
    with pytest.raises(UsageError, match="expected depth of at least 1"):
        play(Toy("a", "b", depth=-1))


def test_a_wrong_path_names_its_argument(tmp_path: Path) -> None:
    for arguments, name in [((1, "x.zt"), "src"), (("x", {}), "dst"), (("x", "y", 7), "recipe")]:
        with pytest.raises(UsageError, match=f"expected a path as {name}") as error:
            ingot.convert(*arguments)
        assert error.value.rule == "store.path"
    with pytest.raises(UsageError, match="unknown option 'formt'"):
        Library(tmp_path / "library").get("a", tmp_path / "b", formt="zt")


@pytest.mark.parametrize("words", ["convert SRC", "store get LIBRARY NAME", "kernel PATH NAME"])
def test_a_result_is_an_argument_or_an_option(words: str, tmp_path: Path) -> None:
    """Every form reaches the same point: the source does not exist."""
    *names, _ = words.split()[:2] if words.startswith("store") else (words.split(maxsplit=1)[0], "")
    positional = [str(tmp_path / name) for name in words.split() if name.isupper()]
    out = str(tmp_path / "out.zt")
    for result in ([out], ["-o", out], ["--output", out], ["--out", out]):
        assert run([*names, *positional, *result]) == 2


def test_a_result_that_is_given_twice_or_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "a", "b", "-o", "c"]) == 2
    assert "DST and --output name the same" in capsys.readouterr().err
    assert run(["convert", "a"]) == 2
    assert "missing DST" in capsys.readouterr().err


def test_every_command_that_writes_takes_output() -> None:
    writing = {"quantize", "convert", "run-plan", "calibrate", "report", "diff", "patch", "merge", "demo", "extract"}
    for words in [*writing, "adapter convert", "adapter extract", "store get", "kernel"]:
        parameters = [item for item in command(words).params if isinstance(item, click.Option)]
        assert any({"-o", "--output", "--out"} <= set(item.opts) for item in parameters), words
        text = command(words).get_help(click.Context(command(words), help_option_names=[]))
        assert "--output" in text
        assert "--out " not in text
