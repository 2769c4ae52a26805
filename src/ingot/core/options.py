"""Options of an operation: one frozen struct says their names, types, defaults and what they do.

A function of the struct gets its fields as keyword parameters (``takes``), and the command line its options
(``cli.declare``). So a new option is written twice: as a field, and where it acts.
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
    """What is known of an option beside its name, type and default.

    Parameters
    ----------
    help : str
        One or two sentences, for Python's ``help`` and the command line.
    flags : tuple of str
        Its names on the command line, where they do not follow from the field's.
    panel, metavar : str
        Heading under which ``--help`` lists it; what stands for its value there.
    least : int or None
        The smallest number allowed; less is a ``UsageError``.
    command : bool
        Whether the command line has it.
    argument : bool
        Whether it stands on the command line without a name.
    """

    help: str
    flags: tuple[str, ...] = ()
    panel: str | None = None
    metavar: str | None = None
    least: int | None = None
    command: bool = True
    argument: bool = False


def about(help: str, *flags: str, **more: Any) -> Mapping[str, About]:
    """Return what ``dataclasses.field`` takes as ``metadata``; see ``About``."""
    return {_KEY: About(help, flags, **more)}


def about_of(item: Field[Any]) -> About:
    """Return what is known of a field."""
    known: About = item.metadata[_KEY]
    return known


def options_of(struct: Any) -> list[Field[Any]]:
    """Return the fields of a struct of options, in the order of its parameters."""
    return sorted(fields(struct), key=lambda item: item.kw_only is True)


class Operation(Protocol[P, S_contra, R_co]):
    """A function that takes a struct of options, or the struct's fields as parameters."""

    @overload
    def __call__(self, options: S_contra, /) -> R_co: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def takes(struct: Callable[P, S], operation: str) -> Callable[[Callable[[S], R]], Operation[P, S, R]]:
    """Give a function of a struct the struct's fields as its parameters, in its signature and in its docstring.

    The function can be called with the struct too. An unknown option, or a number below the least one, is a
    ``UsageError`` with the rule ``OPERATION.option``.
    """
    assert isinstance(struct, type)
    assert is_dataclass(struct)

    def decorate(function: Callable[[S], R]) -> Operation[P, S, R]:
        known = [item.name for item in options_of(struct)]

        @bordered
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if len(args) == 1 and not kwargs and isinstance(args[0], struct):
                options: Any = args[0]
            else:
                for key in kwargs:
                    if key not in known:
                        told = f"unknown option {key!r} of {operation}{did_you_mean(key, known)}"
                        raise UsageError(told, rule=f"{operation}.option")
                options = struct(*args, **kwargs)
            _require_least(options, operation)
            return function(cast("S", options))

        result = inspect.signature(function).return_annotation
        call.__dict__["__signature__"] = inspect.signature(struct).replace(return_annotation=result)
        call.__doc__ = _documented(inspect.cleandoc(function.__doc__ or ""), struct)
        return cast("Operation[P, S, R]", call)

    return decorate


def _require_least(options: Any, operation: str) -> None:
    for item in fields(options):
        least = about_of(item).least
        value = getattr(options, item.name)
        if least is not None and isinstance(value, int) and value < least:
            told = f"expected {item.name} of at least {least}, found {value}"
            raise UsageError(told, rule=f"{operation}.option")


def _documented(doc: str, struct: type[Any]) -> str:
    """Put a section ``Parameters`` before the docstring's first section."""
    lines = ["Parameters", "----------"]
    for item in options_of(struct):
        lines += [f"{item.name} : {item.type}", textwrap.indent(textwrap.fill(about_of(item).help, 100), "    ")]
    parameters = "\n".join(lines)
    head, rule, rest = doc.partition("\n\nReturns\n-------")
    return f"{head}\n\n{parameters}{rule}{rest}\n"
