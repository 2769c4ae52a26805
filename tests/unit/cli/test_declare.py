"""Commands declared by functions and by structs of options: a field of a struct is an option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from click.testing import CliRunner

import ingot
from ingot.cli.declare import declare, option
from ingot.cli.main import app as ingot_app
from ingot.conversion.options import ConvertOptions
from ingot.core.about import About
from ingot.core.options import about, about_of, takes
from ingot.delta.options import DiffOptions, PatchOptions
from ingot.errors import UsageError
from ingot.inspect.options import CompareOptions, VerifyOptions
from ingot.inspect.page.options import ReportOptions
from ingot.runtime.loading.options import Loading, LoadOptions

if TYPE_CHECKING:
    from nowhere import Callback


@dataclass(frozen=True)
class Toy:
    """A toy."""

    src: str = field(metadata=about("What.", argument=True))
    _: KW_ONLY
    out: str = field(default="-", metadata=about("Where to.", "--out", "-o"))
    depth: int | None = field(default=None, metadata=about("How deep.", metavar="N", minimum=1))
    rate: float = field(default=0.5, metadata=about("How fast.", panel="More"))
    force: bool = field(default=False, metadata=about("Do it."))
    check: bool = field(default=True, metadata=about("Look first."))
    proof: bool | None = field(default=None, metadata=about("Show it."))
    digest: Literal["crc32c", "sha256"] | None = field(default="crc32c", metadata=about("Which digest."))
    size: int | str | None = field(default=None, metadata=about("How much."))
    options: Mapping[str, Any] = field(default_factory=dict, metadata=about("Any.", "--option"))
    skip: Sequence[str] = field(default=(), metadata=about("Not these."))
    chips: str | Sequence[str] = field(default="m1", metadata=about("Some."))
    span: tuple[float, float] | None = field(default=None, metadata=about("From, to."))
    told: Callback | None = field(default=None, metadata=about("Called.", command=False))


@dataclass(frozen=True)
class Other:
    """Another."""

    place: str = field(metadata=about("Elsewhere.", "--elsewhere"))


def line(*words: str) -> tuple[int, Toy | None, bool, str]:
    seen: list[tuple[Toy, bool]] = []

    def command(options: Toy, loud: Annotated[bool, About("Noise.")] = False) -> None:
        """Do what a toy does."""
        seen.append((options, loud))

    done = CliRunner().invoke(declare("toy")(command), list(words), catch_exceptions=False)
    return done.exit_code, *(seen[0] if seen else (None, False)), done.output


def test_what_is_not_said_is_the_structs_own() -> None:
    assert line("a")[1:3] == (Toy("a"), False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-o", "x", "--depth", "3", "--rate", "2"), {"out": "x", "depth": 3, "rate": 2.0}),
        (("--force", "--no-check", "--no-proof"), {"force": True, "check": False, "proof": False}),
        (("--proof", "--digest", "none", "--size", "2GiB"), {"proof": True, "digest": None, "size": "2GiB"}),
        (("--digest", "sha256", "--skip", "a", "--skip", "b"), {"digest": "sha256", "skip": ("a", "b")}),
        (("--option", "a=1", "--option", "b=x", "--option", "c=true"), {"options": {"a": 1, "b": "x", "c": True}}),
        (("--chips", "m1,m4"), {"chips": "m1,m4"}),
        (("--span=-1,2.5",), {"span": (-1.0, 2.5)}),
    ],
)
def test_values_have_the_types_of_the_fields(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert line("a", *words, "--loud")[1:3] == (Toy("a", **expected), True)


@pytest.mark.parametrize(
    "words", [("--depth", "0"), ("--digest", "md5"), ("--told", "x"), ("--no-force",), ("--rate", "fast")]
)
def test_other_values_are_refused_by_the_parser(words: tuple[str, ...]) -> None:
    assert line("a", *words)[0] == 2


@pytest.mark.parametrize("words", [("--option", "a"), ("--option", "=1"), ("--span", "1"), ("--span", "1,x")])
def test_texts_in_another_shape_are_refused_by_rule(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        line("a", *words)
    assert caught.value.rule == "cli.option"


def test_help_tells_of_every_field_what_it_does() -> None:
    told = " ".join(line("--help-all")[3].split())
    for item in fields(Toy):
        assert (about_of(item).help in told) == about_of(item).command


def test_an_option_added_to_a_struct_is_in_python_and_on_the_command_line() -> None:
    """Two places: the field, and where it acts. Nobody else is told."""

    @dataclass(frozen=True)
    class More(Toy):
        colour: str = field(default="red", metadata=about("Which colour."))

    @takes(More, "toy")
    def paint(options: More) -> str:
        """Paint."""
        return options.colour

    made: list[str] = []

    def command(options: More) -> None:
        made.append(paint(options))

    command.__annotations__ = {"options": More, "return": None}
    app = declare("toy")(command)
    CliRunner().invoke(app, ["a", "--colour", "blue"], catch_exceptions=False)
    assert made == ["blue"]
    assert paint("a", colour="green") == "green"
    assert paint("a") == paint(More("a")) == "red"
    assert signature(paint).parameters["colour"].default == "red"
    assert "Which colour." in (paint.__doc__ or "")


def test_a_commands_own_option_can_stand_for_a_field_of_another_struct() -> None:
    made: list[str | None] = []

    def command(options: Toy, other: str | None = None) -> None:
        made.append(other)

    command.__annotations__ = {"options": Toy, "other": Annotated[str | None, option(Other, "place")], "return": None}
    app = declare("toy")(command)
    assert "Elsewhere." in CliRunner().invoke(app, ["--help"]).output
    CliRunner().invoke(app, ["a", "--elsewhere", "x"], catch_exceptions=False)
    assert made == ["x"]


def test_a_command_may_take_several_structs_and_options_of_its_own_in_any_order() -> None:
    made: list[tuple[int, Toy, Other]] = []

    def command(*, depths: int = 1, toy: Toy, loud: bool = False, other: Other) -> None:
        made.append((depths, toy, Other(other.place + "!" * loud)))

    command.__annotations__ = {"depths": int, "toy": Toy, "loud": bool, "other": Other, "return": None}
    app = declare("toy")(command)
    CliRunner().invoke(app, ["a", "--rate", "2", "--elsewhere", "x", "--loud"], catch_exceptions=False)
    assert made == [(1, Toy("a", rate=2.0), Other("x!"))]


def test_a_parameter_may_have_the_name_of_a_field_that_only_python_has() -> None:
    seen: list[tuple[Toy, str]] = []

    def command(toy: Toy, told: str = "") -> None:
        seen.append((toy, told))

    CliRunner().invoke(declare("toy")(command), ["a", "--told", "x"], catch_exceptions=False)
    assert seen == [(Toy("a"), "x")]


@pytest.mark.parametrize(("given", "word"), [({"color": "x"}, "colour"), ({"depth": 0}, "depth")])
def test_wrong_calls_name_the_operation_and_the_option(given: dict[str, Any], word: str) -> None:
    @dataclass(frozen=True)
    class More(Toy):
        colour: str = field(default="red", metadata=about("Which colour."))

    @takes(More, "toy")
    def paint(options: More) -> None:
        """Paint."""

    with pytest.raises(UsageError) as caught:
        paint("a", **given)
    assert caught.value.rule == "toy.option"
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("name", "struct"),
    [
        ("convert", ConvertOptions),
        ("diff", DiffOptions),
        ("patch", PatchOptions),
        ("compare", CompareOptions),
        ("verify", VerifyOptions),
        ("report", ReportOptions),
    ],
)
def test_commands_functions_and_structs_have_the_same_options(name: str, struct: type[Any]) -> None:
    known = {item.name for item in fields(struct)}
    assert set(signature(getattr(ingot, name)).parameters) == known
    taken = {parameter.name for parameter in ingot_app.commands[name].params}
    assert {item.name for item in fields(struct) if about_of(item).command} <= taken
    assert {"json", "quiet"} <= taken - known


def test_commands_that_run_a_model_take_the_options_of_load_model() -> None:
    assert set(signature(ingot.load_model).parameters) == {item.name for item in fields(LoadOptions)}
    for name, struct in (("generate", LoadOptions), ("eval", Loading)):
        taken = {parameter.name for parameter in ingot_app.commands[name].params}
        assert {item.name for item in fields(struct) if about_of(item).command} <= taken
