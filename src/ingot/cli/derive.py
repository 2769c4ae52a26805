"""Parameters of a command made from structs of options (``core.options``).

What a value may be follows from the field's type: a flag, a number, one of several names (``none`` for None), text;
sequences may be given several times, mappings as NAME=VALUE, pairs of numbers as LOW,HIGH. What is only for Python
(callbacks, recipes as objects) is left out, or given as text where the field takes text too.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import typer

from ingot.core.options import About, about_of, options_of
from ingot.errors import UsageError

NONE = "none"


class _OnlyPython:
    """Stands for types that a module of options imports for type checkers only: no text of a command line is one."""


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _OnlyPython


def derived(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters that are structs of options are replaced by parameters for their fields.

    The further parameters are the command's own. Their order is that of ``--help``.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    structs: dict[str, type[Any]] = {name: hint for name, hint in hints.items() if _is_struct(hint)}
    types = {name: _types(struct) for name, struct in structs.items()}
    shown = {name: [item for item in options_of(struct) if about_of(item).command] for name, struct in structs.items()}

    @wraps(command)
    def call(**values: Any) -> None:
        made: dict[str, Any] = {}
        for name, struct in structs.items():
            asked = {item.name: _value(item, types[name][item.name], values.pop(item.name)) for item in shown[name]}
            made[name] = struct(**{key: value for key, value in asked.items() if value is not MISSING})
        command(**made, **values)

    parameters: list[inspect.Parameter] = []
    for name, item in inspect.signature(command).parameters.items():
        if name in structs:
            parameters += [_parameter(each, types[name][each.name]) for each in shown[name]]
        else:
            parameters.append(item.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
    call.__dict__["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {item.name: item.annotation for item in parameters}
    del call.__wrapped__
    return call


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _types(struct: type[Any]) -> dict[str, Any]:
    names = _Names({**vars(builtins), **vars(typing), **vars(sys.modules[struct.__module__])})
    return typing.get_type_hints(struct, names, names)


def _members(kind: Any) -> tuple[list[Any], bool]:
    """Return what a union is of, and whether None is among it."""
    union = typing.get_origin(kind) in (typing.Union, UnionType)
    members = list(typing.get_args(kind)) if union else [kind]
    return [member for member in members if member is not NoneType], NoneType in members


def _plain(kind: Any, default: Any) -> Any:
    """Return the type of a field as a command line can take it, None left aside; one text where the default is one."""
    members, _ = _members(kind)
    origins = [typing.get_origin(member) or member for member in members]
    if (Sequence in origins and not isinstance(default, str)) or Mapping in origins:
        return list[str]
    if str in members or Any in members or tuple in origins:
        return str
    if Literal in origins:
        choices = typing.get_args(members[0])
        return Literal[(*choices, NONE)] if _members(kind)[1] else members[0]
    return members[0]


def _parameter(item: Field[Any], kind: Any) -> inspect.Parameter:
    known, plain = about_of(item), _plain(kind, item.default)
    required = item.default is MISSING and item.default_factory is MISSING
    optional = not required and (item.default is MISSING or item.default is None)
    default: Any = inspect.Parameter.empty if required else None if optional else item.default
    if plain is list[str] and default == ():
        optional, default = True, None
    taken: Any = plain | None if optional else plain
    annotation = Annotated[taken, _info(item, known, plain)]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(struct: type[Any], name: str) -> Any:
    """Return what a parameter of a command's own is annotated with that stands for a field of another operation."""
    item = next(item for item in fields(struct) if item.name == name)
    return _info(item, about_of(item), _plain(_types(struct)[name], item.default))


def _info(item: Field[Any], known: About, plain: Any) -> Any:
    if known.argument:
        return typer.Argument(help=known.help, metavar=known.metavar)
    flags = known.flags
    if plain is bool and item.default is False and not flags:
        flags = (f"--{item.name.replace('_', '-')}",)
    return typer.Option(*flags, help=known.help, metavar=known.metavar, min=known.least, rich_help_panel=known.panel)


def _value(item: Field[Any], kind: Any, value: Any) -> Any:
    """Return a value of the field's type; MISSING where the struct's own default is meant."""
    members, optional = _members(kind)
    origins = [typing.get_origin(member) or member for member in members]
    if value is None or value == []:
        return MISSING
    if Literal in origins and optional and value == NONE:
        return None
    if Mapping in origins:
        return pairs(value, (about_of(item).flags or (f"--{item.name}",))[0])
    if Sequence in origins and not isinstance(value, str):
        return tuple(value)
    if tuple in origins:
        return low_high(value, (about_of(item).flags or (f"--{item.name}",))[0])
    return value


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Read ``NAME=VALUE``: numbers, true and false as such, anything else as text."""
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
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def low_high(text: str, option: str) -> tuple[float, float]:
    """Read ``LOW,HIGH``."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"expected {option} LOW,HIGH, found {text!r}", rule="cli.option") from None
    return low, high
