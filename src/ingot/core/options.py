"""Options of an operation, declared by one frozen dataclass: names, types, defaults and help texts.

``takes`` gives a function the fields of the dataclass as keyword parameters, and ``cli.declare`` makes them options of
the command line. So a new option is written in two places: as a field, and in the code that uses it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from ingot.core.border import bordered
from ingot.core.registry import did_you_mean
from ingot.errors import UsageError

_KEY = "ingot"

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of an option, in addition to its name, type and default.

    Parameters
    ----------
    help : str
        One or two sentences, for Python's ``help`` and the command line.
    flags : tuple of str
        Names on the command line, if they do not follow from the field's name.
    panel : str or None
        The heading under which ``--help`` lists the option.
    metavar : str or None
        The placeholder of the value in ``--help``.
    minimum : int or None
        The smallest allowed number; a smaller one is a ``UsageError``.
    command : bool
        Whether the command line has the option.
    argument : bool
        Whether the option is a positional argument of the command line.
    """

    help: str
    flags: tuple[str, ...] = ()
    panel: str | None = None
    metavar: str | None = None
    minimum: int | None = None
    command: bool = True
    argument: bool = False


def about(help: str, *flags: str, **settings: Any) -> Mapping[str, About]:
    """Return an ``About`` in the form that ``dataclasses.field`` accepts as ``metadata``."""
    return {_KEY: About(help, flags, **settings)}


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
    unknown option, or a number below the minimum, is a ``UsageError`` with the rule ``OPERATION.option``.
    """
    assert isinstance(struct, type)
    assert is_dataclass(struct)

    def decorate(function: Callable[[S], R]) -> Operation[P, S, R]:
        names = [item.name for item in options_of(struct)]

        @bordered
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if len(args) == 1 and not kwargs and isinstance(args[0], struct):
                options: Any = args[0]
            else:
                for key in kwargs:
                    if key not in names:
                        message = f"unknown option {key!r} of {operation}{did_you_mean(key, names)}"
                        raise UsageError(message, rule=f"{operation}.option")
                options = struct(*args, **kwargs)
            _check_minimums(options, operation)
            return function(cast("S", options))

        result = inspect.signature(function).return_annotation
        call.__dict__["__signature__"] = inspect.signature(struct).replace(return_annotation=result)
        call.__doc__ = _with_parameters(inspect.cleandoc(function.__doc__ or ""), struct)
        return cast("Operation[P, S, R]", call)

    return decorate


def _check_minimums(options: Any, operation: str) -> None:
    for item in fields(options):
        minimum = about_of(item).minimum
        value = getattr(options, item.name)
        if minimum is not None and isinstance(value, int) and value < minimum:
            message = f"expected {item.name} of at least {minimum}, found {value}"
            raise UsageError(message, rule=f"{operation}.option")


def _with_parameters(doc: str, struct: type[Any]) -> str:
    """Return a docstring with a section ``Parameters`` added before ``Returns``."""
    lines = ["Parameters", "----------"]
    for item in options_of(struct):
        lines += [f"{item.name} : {item.type}", textwrap.indent(textwrap.fill(about_of(item).help, 100), "    ")]
    parameters = "\n".join(lines)
    head, title, tail = doc.partition("\n\nReturns\n-------")
    return f"{head}\n\n{parameters}{title}{tail}\n"
