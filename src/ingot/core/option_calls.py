"""Arguments of a call as an options object: names as on the command line, and errors that name the argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field
from inspect import Parameter, signature
from keyword import iskeyword
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any

from ingot.core.about import About
from ingot.core.registry import did_you_mean
from ingot.errors import UsageError

_COMMAND = re.compile(r"(`[^`]*`)")
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)(?: (?!-)([\w.:+/-]*\w))?")
_PROSE = re.compile(
    "accepts|alone|also|and|applies|are|between|by|do|for|has|if|in|is|keeps|leaves|lists|may|need|needs|on|or|"
    "quantizes|requires|stores|takes|the|then|to|with|without|writes"
)
"""Words that follow the name of an option in messages and are not its value."""
_SCALARS = (bool, int, float, str, bytes, type(None))


def keywords(name: str, about: About) -> Iterator[str]:
    """Yield the keywords of an option: its field's name, then the long names that the command line gives it.

    A reserved word of Python gets an underscore: ``for_``.
    """
    yield name
    if about.command:
        for flag in (*about.flags, *about.aliases):
            keyword = flag.partition("/")[0].lstrip("-").replace("-", "_")
            if flag.startswith("--") and keyword != name:
                yield f"{keyword}_" if iskeyword(keyword) else keyword


def with_keywords(message: str, fields: Mapping[str, tuple[Field[Any], About]]) -> str:
    """Return a message with Python's spelling of the options: ``bits=4`` for ``--bits 4``, ``resume=True`` for
    ``--resume``, ``bits=`` for ``--bits`` alone.

    Commands in backticks are unchanged. An option is also unchanged if the message already has its Python spelling.
    """
    names = {
        f"--{keyword.rstrip('_').replace('_', '-')}": name
        for name, (_, about) in fields.items()
        if about.command
        for keyword in keywords(name, about)
    }

    def spelled(match: re.Match[str]) -> str:
        name = names.get(match[1])
        if name is None or re.search(rf"\b{name}=", message):
            return match[0]
        following = match[2] or ""
        if fields[name][0].type == "bool":
            return f"{name}=True {following}".rstrip()
        return f"{name}= {following}" if _PROSE.fullmatch(following) else f"{name}={following}"

    parts = _COMMAND.split(message)
    return "".join(text if index % 2 else _FLAG.sub(spelled, text) for index, text in enumerate(parts))


def bind(
    struct: Callable[..., Any],
    fields: Mapping[str, tuple[Field[Any], About]],
    operation: str,
    function: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the options object for the arguments of a call.

    Raises ``UsageError`` ``OPERATION.option`` for an unknown argument, one given twice, or a missing one, and the
    errors of ``check_value``.
    """
    rule = f"{operation}.option"
    names = {keyword: name for name, (_, about) in fields.items() for keyword in keywords(name, about)}
    parameters = signature(struct).parameters.values()
    positional = [item.name for item in parameters if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        message = f"{function}() takes at most {len(positional)} arguments by position, found {len(args)}"
        raise UsageError(f"{message}; name the later ones", rule=rule)
    values = dict(zip(positional, args, strict=False))
    for keyword, value in kwargs.items():
        if keyword not in names:
            raise UsageError(f"unknown option {keyword!r} of {operation}{did_you_mean(keyword, names)}", rule=rule)
        if names[keyword] in values:
            raise UsageError(f"{function}() got {names[keyword]!r} twice; give it once", rule=rule)
        values[names[keyword]] = value
    required = [item.name for item in parameters if item.default is Parameter.empty]
    missing = [name for name in required if name not in values]
    if missing:
        call = f"{function}({', '.join(required)}, ...)"
        raise UsageError(f"expected {call}, found no {' and no '.join(missing)}", rule=rule)
    for name, value in values.items():
        check_value(name, value, *fields[name], operation)
    return struct(**values)


def check_value(name: str, value: Any, field: Field[Any], about: About, operation: str) -> None:
    """Raise ``UsageError`` if a value has none of the types of its option.

    Types that this module does not support are not checked. A number below the minimum is an error too. The rule is
    ``OPERATION.option``. Exceptions: ``store.path`` for a path, and ``size.syntax`` for a size.
    """
    if field.default is not MISSING and value is field.default:
        return
    types = str(field.type).split(" | ")
    accepted = any(_has_type(value, text) for text in types)
    if not accepted and "AnyPath" in types:
        raise UsageError(f"expected a path as {name}, found {repr(value)[:200]}", rule="store.path")
    rule = f"{operation}.option"
    if isinstance(value, list | tuple) and not {"Sequence[AnyPath]", "Sequence[Any]"}.isdisjoint(types):
        for item in value:
            if isinstance(item, _SCALARS) and not isinstance(item, str):
                raise UsageError(f"expected paths as {name}, found {repr(item)[:200]}", rule="store.path")
    if not accepted:
        nouns = " or ".join(_NOUNS.get(text, text) for text in types)
        raise UsageError(f"expected {name} to be {nouns}, found {repr(value)[:80]}", rule=rule)
    if about.size and value is not None:
        check_size(name, value)
    if about.minimum is not None and isinstance(value, int) and value < about.minimum:
        raise UsageError(f"expected {name} of at least {about.minimum}, found {value}", rule=rule)


def check_size(name: str, value: Any) -> None:
    """Raise ``UsageError`` ``size.syntax`` at the argument ``name`` if a value is no size."""
    from ingot.core.runtime.memory import parse_size  # noqa: PLC0415 - it imports the compiled kernels

    try:
        parse_size(value)
    except UsageError as error:
        raise UsageError(error.message, rule=error.rule, where=name) from None


def _has_type(value: Any, text: str) -> bool:
    """Return whether a value has the type of an annotation; True for every object whose type is unknown here."""
    is_scalar = isinstance(value, _SCALARS)
    if text in _TYPES:
        is_number = text in ("int", "float")
        return isinstance(value, _TYPES[text]) and not (is_number and isinstance(value, bool))
    if text == "bool":
        return isinstance(value, bool) or type(value).__name__ == "bool_"
    if text == "Sequence[str]" and isinstance(value, Mapping | list | tuple):
        return not isinstance(value, Mapping) and all(isinstance(item, str) for item in value)
    if text == "AnyPath":
        return isinstance(value, str | PathLike) or not (is_scalar or isinstance(value, dict | list | tuple))
    return not is_scalar or text == "Any" or text.startswith(("Literal[", "Digest"))


_TYPES: dict[str, Any] = {"int": Integral, "float": Real, "str": str, "None": NoneType}
_NOUNS = {
    "bool": "True or False",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "None": "None",
    "ProgressCallback": "a function of an event",
    "Sequence[str]": "a list of texts",
}
