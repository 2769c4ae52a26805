"""The errors that Ingot raises.

An error message is one line: what is wrong, where, what was expected, and what to do. An error about a file also has a
*rule* (``zt.blob-out-of-bounds``), which the spec page of the format lists. Tests and tools can match rules instead of
wordings. All errors that a file's bytes can cause are ``ValueError`` too, as callers of other readers expect.
"""

from __future__ import annotations

from typing import Any

DISTRIBUTION = "ingot"
"""The name of the distribution in ``pyproject.toml``."""

INGOT_VERSION = "0.1.0"
"""The version of the distribution; ``ingot.__version__`` repeats it."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def printable(text: str) -> str:
    """Return text with escapes for characters that are not printable: newlines, terminal sequences, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class IngotError(Exception):
    """The base class of all errors; ``exit_code`` is the exit code of the command line.

    Parameters
    ----------
    message : str
        The problem, the expected input, and the advice.
    rule : str, optional
        The stable identifier of the violated rule.
    where : str, optional
        The file, tensor, field or byte offset.

    Examples
    --------
    >>> try:
    ...     ingot.open("gone.zt")
    ... except ingot.IngotError as error:
    ...     print(error.rule, error.exit_code)
    open.missing 2
    """

    exit_code = 1

    def __init__(self, message: str, *, rule: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rule = rule
        self.where = where

    def __str__(self) -> str:
        text = printable(f"{self.where}: {self.message}" if self.where else self.message)
        return f"{text} [{self.rule}]" if self.rule else text

    def add_location(self, where: str) -> IngotError:
        """Put ``where`` in front of the error's location, and return the error.

        Outer layers of the code call this to add the file or tensor that they process.
        """
        self.where = f"{where}: {self.where}" if self.where else where
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the error by its attributes, because constructors of subclasses have different parameters."""
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(cls: type[IngotError], args: tuple[Any, ...], state: dict[str, Any]) -> IngotError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class FormatError(IngotError, ValueError):
    """The bytes break a rule of their format."""

    def __init__(self, rule: str, message: str, *, where: str | None = None) -> None:
        super().__init__(message, rule=rule, where=where)


class IntegrityError(IngotError, ValueError):
    """The bytes are well-formed, but do not match a digest or length, or the file changed."""

    def __init__(self, rule: str, message: str, *, where: str | None = None) -> None:
        super().__init__(message, rule=rule, where=where)


class CodecError(IngotError, ValueError):
    """A codec cannot encode these values or decode these parts."""

    def __init__(self, rule: str, message: str, *, where: str | None = None) -> None:
        super().__init__(message, rule=rule, where=where)


class UnsupportedError(IngotError, ValueError):
    """The input is well-formed, but Ingot cannot decode it, or the target cannot represent it.

    It is a ``ValueError``, because one changed byte can turn a version, element type or codec into an unknown one.
    """


class UsageError(IngotError):
    """The caller passed an invalid option, name or path."""

    exit_code = 2


class ResourceError(IngotError):
    """The machine lacks a resource: disk space, memory within the limit, permission to write."""


class PluginError(IngotError):
    """An entry of an installed plugin cannot be used; the message names the plugin's distribution."""


class MissingExtraError(IngotError, ImportError):
    """An optional package is needed and not installed."""

    exit_code = 3

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is needed for this: {install_hint(extra)}", rule="extra.missing")
        self.extra = extra
