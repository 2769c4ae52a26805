"""Build commands from functions: each parameter of a function becomes an option or an argument of its command.

Each parameter has an annotation with its type and an ``About``. If the type is a struct of options
(``core.options``), each field of the struct becomes an option; fields with ``command=False`` are left out.

The type decides which values are accepted: a flag, a number, one of several names (``none`` for None), or text. An
option with a sequence can be repeated. An option with a mapping takes NAME=VALUE, and one with a pair of numbers takes
LOW,HIGH. If the user gives no value, the default of the function or of the struct applies.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from ingot.cli.finished import RunRecord
from ingot.cli.help import Command, Option
from ingot.core.about import About
from ingot.core.options import about_of, options_of
from ingot.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

NONE = "none"
_AS_OPTION = "__as_option"  # suffix of a parameter that accepts an argument as an option
_NOT_GIVEN = (None, ())  # values that the parser passes for options without a value


def declare(name: str, epilog: str = "") -> Callable[[Callable[..., object]], click.Command]:
    """Return a decorator that turns a function into the command ``name``; ``--help`` shows its docstring."""

    def decorate(function: Callable[..., object]) -> click.Command:
        hints = typing.get_type_hints(function, include_extras=True)
        structs = {key: hint for key, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
        declared = {item.parameter.name: item for item in _declarations(function, hints, structs)}
        names = {key: [item.name for item in _command_fields(struct)] for key, struct in structs.items()}

        def call(**values: Any) -> object:
            for key in [key for key in values if key.endswith(_AS_OPTION)]:
                _merge_argument(values, key, declared)
            for key, item in declared.items():
                if item.reads and values[key] not in _NOT_GIVEN:
                    _require_paths(values[key])
            record = RunRecord(name, values) if values.get("resume") else None
            if record is not None and record.is_complete():
                _print_complete(record, json=bool(values.get("json")))
                return None
            arguments = {key: declared[key].convert(value) for key, value in values.items() if value not in _NOT_GIVEN}
            options = {
                key: struct(**{item: arguments.pop(item) for item in names[key] if item in arguments})
                for key, struct in structs.items()
            }
            result = function(**options, **arguments)
            if record is not None:
                record.write()
            return result

        parameters = [item.parameter for item in declared.values()]
        return Command(name, callback=call, params=parameters, help=inspect.getdoc(function), epilog=epilog)

    return decorate


def _print_complete(record: RunRecord, *, json: bool) -> None:
    from ingot.cli.output import line, print_json

    if json:
        print_json({"complete": True, "destination": record.output})
    else:
        line(f"{record.output}: already complete, by the same command; nothing was written")


def _merge_argument(values: dict[str, Any], option_name: str, declared: Mapping[str, _Declaration]) -> None:
    """Move the value of an option to the positional argument with the same meaning; raise an error if both have a
    value.
    """
    name = option_name.removesuffix(_AS_OPTION)
    value = values.pop(option_name)
    metavar = declared[name].parameter.make_metavar(click.get_current_context()).strip("[]")
    flag = max(declared[option_name].parameter.opts, key=len)
    if value is not None and values[name] is not None:
        raise click.UsageError(f"{metavar} and {flag} name the same; give one of them")
    values[name] = values[name] if value is None else value
    if values[name] is None and declared[name].is_required:
        raise click.UsageError(f"missing {metavar}: give it as an argument, or as {flag}")


def _require_paths(value: str | Sequence[str]) -> None:
    from ingot.stores.location import require_local

    for path in [value] if isinstance(value, str) else value:
        require_local(path)


def option(struct: type[Any], name: str) -> About:
    """Return the ``About`` of a struct's field, to annotate a parameter with the same meaning."""
    return about_of(next(item for item in fields(struct) if item.name == name))


@dataclass(frozen=True, slots=True)
class _Declaration:
    """A click parameter, and the function that converts its value to what the command's function expects."""

    parameter: click.Parameter
    convert: Callable[[Any], Any]
    is_required: bool = False
    reads: bool = False


def _declarations(
    function: Callable[..., object], hints: Mapping[str, Any], structs: Mapping[str, type[Any]]
) -> Iterator[_Declaration]:
    """Yield a declaration for each parameter and each field, in the order of ``--help``."""
    for item in inspect.signature(function).parameters.values():
        if item.name in structs:
            types = _field_types(structs[item.name])
            for field in _command_fields(structs[item.name]):
                yield from _declared(field.name, types[field.name], _default(field), about_of(field))
            continue
        hint = hints[item.name]
        about = About("")
        if typing.get_origin(hint) is Annotated:
            hint, about = typing.get_args(hint)[:2]
        yield from _declared(item.name, hint, MISSING if item.default is item.empty else item.default, about)


def _declared(name: str, hint: Any, default: Any, about: About) -> Iterator[_Declaration]:
    """Yield the declaration of a parameter.

    If a positional argument may also be given as an option, a second declaration for the option follows.
    """
    if not (about.argument and about.flags):
        yield _declaration(name, hint, default, about)
        return
    flags = ", ".join(sorted(about.flags, key=len))
    help_text = f"{about.help.removesuffix('.')}; also {flags}."
    as_argument = _declaration(name, hint, None, replace(about, flags=(), help=help_text))
    yield replace(as_argument, is_required=default is MISSING)
    as_option = _declaration(f"{name}{_AS_OPTION}", hint, None, replace(about, argument=False))
    as_option.parameter.hidden = True  # type: ignore[attr-defined]
    yield as_option


class _OnlyPython:
    """A stand-in for types that are only imported for type checkers; the command line cannot create their values."""


class _Names(dict[str, Any]):
    """The namespace in which type hints are evaluated; an unknown name evaluates to ``_OnlyPython``."""

    def __missing__(self, name: str) -> Any:
        return _OnlyPython


def _field_types(struct: type[Any]) -> dict[str, Any]:
    names = _Names({**vars(builtins), **vars(typing), **vars(sys.modules[struct.__module__])})
    return typing.get_type_hints(struct, names, names)


def _command_fields(struct: type[Any]) -> list[Field[Any]]:
    return [item for item in options_of(struct) if about_of(item).command]


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING and field.default_factory is not MISSING else field.default


def _declaration(name: str, hint: Any, default: Any, about: About) -> _Declaration:
    """Declare one parameter; a ``default`` of ``MISSING`` makes it required."""
    flags = about.flags or (f"--{name.replace('_', '-')}",)
    members, optional = _members(hint)
    origins = [typing.get_origin(member) or member for member in members]
    several = Mapping in origins or (Sequence in origins and not isinstance(default, str))
    accepted, convert = _accepted(members, origins, about)
    if Mapping in origins:
        convert = partial(pairs, option=flags[0])
    elif several:
        convert = tuple
    elif tuple in origins:
        convert = partial(low_high, option=flags[0])
    elif Literal in origins and optional:
        accepted = click.Choice([*accepted.choices, NONE])
        convert = _none_or_text
    common: dict[str, Any] = {"type": accepted, "required": default is MISSING, "metavar": about.metavar}
    if accepted is click.STRING:
        common["shell_complete"] = _complete_path
    if about.argument:
        return _Declaration(_argument(name, about, default, several, common), convert, reads=about.reads)
    if accepted is click.BOOL and not about.flags and default is not False:
        flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    shown = flags[0].partition("/")[0].lstrip("-") if default is True else default
    common |= {"panel": about.panel, "aliases": about.aliases, "help": _help_text(about, shown)}
    if default is not MISSING:
        common["default"] = None
    is_flag = True if accepted is click.BOOL else None
    return _Declaration(Option([name, *flags], is_flag=is_flag, multiple=several, **common), convert, reads=about.reads)


def _argument(name: str, about: About, default: Any, several: bool, common: dict[str, Any]) -> click.Argument:
    if about.metavar is not None:
        metavar = about.metavar if default is MISSING else f"[{about.metavar}]"
        common["metavar"] = f"{metavar}..." if several else metavar
    argument = click.Argument([name], nargs=-1 if several else 1, **common)
    argument.help = _help_text(about, default)
    return argument


def _members(hint: Any) -> tuple[list[Any], bool]:
    """Return the members of a union, and whether None is one of them."""
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    members = list(typing.get_args(hint)) if is_union else [hint]
    return [member for member in members if member is not NoneType], NoneType in members


def _accepted(members: Sequence[Any], origins: Sequence[Any], about: About) -> tuple[Any, Callable[[Any], Any]]:
    """Return click's type for a union of types, and the function that converts its values."""
    if {str, Any, tuple, Mapping, Sequence} & set(origins):
        return click.STRING, _unchanged
    if Literal in origins:
        return click.Choice(typing.get_args(members[0])), _unchanged
    if members == [Path]:
        return click.STRING, Path
    types = {bool: click.BOOL, int: click.INT, float: click.FLOAT}
    if members[0] not in types:
        raise TypeError(f"the command line has no values of type {members[0]!r}")
    if members[0] is int and about.minimum is not None:
        return _AtLeast(min=about.minimum), _unchanged
    return types[members[0]], _unchanged


class _AtLeast(click.IntRange):
    name = "integer"  # error messages show it


def _unchanged(value: Any) -> Any:
    return value


def _none_or_text(value: str) -> str | None:
    return None if value == NONE else value


def _complete_path(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the completion for file names, because any text option may be a path."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _help_text(about: About, default: Any) -> str:
    """Return a parameter's help text, followed by its default if there is one."""
    return about.help if default in (MISSING, None, False, (), "") else f"{about.help} [default: {default}]"


def pairs(texts: Iterable[str], option: str) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` texts: numbers, true and false are converted, any other value is text."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"expected {option} NAME=VALUE, found {text!r}", rule="cli.option")
        values[name] = _scalar(value)
    return values


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def low_high(text: str, option: str) -> tuple[float, float]:
    """Parse ``LOW,HIGH`` into two numbers."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"expected {option} LOW,HIGH, found {text!r}", rule="cli.option") from None
    return low, high
