"""Options of an operation, declared by one frozen dataclass: names, types, defaults and help texts.

``takes`` gives a function the fields of the dataclass as keyword parameters, and ``cli.declare`` makes them options of
the command line. So a new option is written in two places: as a field, and in the code that uses it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from ingot.core.about import About as About  # noqa: PLC0414 - modules of options import it from here
from ingot.core.border import bordered
from ingot.core.option_calls import bind, check_value, keywords, with_keywords
from ingot.core.registry import did_you_mean
from ingot.errors import IngotError, UsageError

_KEY = "ingot"
OUTPUT = ("--output", "-o")
"""The names of the option for the result, on every command that writes one."""
OUT = ("--out",)
"""An alias of ``--output``."""

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


def about(help: str, *flags: str, **settings: Any) -> Mapping[str, About]:
    """Return an ``About`` in the form that ``dataclasses.field`` accepts as ``metadata``."""
    return {_KEY: About(help, flags, **settings)}


def source(help: str, **settings: Any) -> Mapping[str, About]:
    """Return the metadata of a positional argument that names an existing file or folder, or an address."""
    return about(help, reads=True, argument=True, **settings)


def about_of(item: Field[Any]) -> About:
    """Return the metadata of an option's field."""
    metadata: About = item.metadata[_KEY]
    return metadata


def options_of(struct: Any) -> list[Field[Any]]:
    """Return the fields of an options class, in the order of its constructor's parameters."""
    return sorted(fields(struct), key=lambda item: item.kw_only is True)


class Operation(Protocol[P, S_contra, R_co]):
    """A function that takes an options object, or its fields as parameters."""

    @overload
    def __call__(self, options: S_contra, /) -> R_co: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def takes(struct: Callable[P, S], operation: str) -> Callable[[Callable[[S], R]], Operation[P, S, R]]:
    """Decorate a function of an options object so that it takes the object's fields as parameters.

    The parameters are added to the signature and to the docstring. The function still accepts the object itself. An
    unknown or missing option, or a value that it does not allow, is a ``UsageError`` (``option_calls.bind``). Errors
    name options as the caller writes them: ``--bits`` if the caller gives the object, ``bits=`` for parameters.
    """
    assert isinstance(struct, type)
    assert is_dataclass(struct)

    def decorate(function: Callable[[S], R]) -> Operation[P, S, R]:
        fields_by_name = {item.name: (item, about_of(item)) for item in options_of(struct)}

        @bordered
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if len(args) == 1 and not kwargs and isinstance(args[0], struct):
                options: Any = args[0]
                for name, described in fields_by_name.items():
                    check_value(name, getattr(options, name), *described, operation)
                return function(cast("S", options))
            options = bind(struct, fields_by_name, operation, function.__name__, args, kwargs)
            try:
                return function(cast("S", options))
            except IngotError as error:  # written for the command line
                error.message = with_keywords(error.message, fields_by_name)
                raise

        result = inspect.signature(function).return_annotation
        call.__dict__["options"] = struct
        call.__dict__["__signature__"] = inspect.signature(struct).replace(return_annotation=result)
        call.__doc__ = _with_parameters(inspect.cleandoc(function.__doc__ or ""), struct)
        return cast("Operation[P, S, R]", call)

    return decorate


def with_options(structs: tuple[Any, ...], options: Mapping[str, Any], operation: str) -> tuple[Any, ...]:
    """Return several options objects with the options that a call gives as keywords; each object takes its own.

    Raises ``UsageError`` ``OPERATION.option`` for an unknown option, and the errors of ``check_value``.
    """
    descriptions = [{item.name: (item, about_of(item)) for item in options_of(struct)} for struct in structs]
    owners = {
        keyword: (index, name)
        for index, described in enumerate(descriptions)
        for name, (_, about) in described.items()
        for keyword in keywords(name, about)
    }
    values: list[dict[str, Any]] = [{} for _ in structs]
    for keyword, value in options.items():
        if keyword not in owners:
            message = f"unknown option {keyword!r} of {operation}{did_you_mean(keyword, owners)}"
            raise UsageError(message, rule=f"{operation}.option")
        index, name = owners[keyword]
        check_value(name, value, *descriptions[index][name], operation)
        values[index][name] = value
    return tuple(replace(struct, **changes) for struct, changes in zip(structs, values, strict=True))


def _with_parameters(doc: str, struct: type[Any]) -> str:
    """Return a docstring with a section ``Parameters`` added before ``Returns``."""
    lines = ["Parameters", "----------"]
    for item in options_of(struct):
        lines += [f"{item.name} : {item.type}", textwrap.indent(textwrap.fill(about_of(item).help, 100), "    ")]
    parameters = "\n".join(lines)
    head, title, tail = doc.partition("\n\nReturns\n-------")
    return f"{head}\n\n{parameters}{title}{tail}\n"
