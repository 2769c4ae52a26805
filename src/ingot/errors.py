"""Every error that Ingot raises on purpose.

An error message is one line that says what was expected, what was found, where, and what to do. A refusal of a file
also names a *rule* (``zt.blob-out-of-bounds``), listed on the spec page of the format, so that tests and tools match
rules and not words. Whatever a file's bytes can cause is a ``ValueError`` too, as callers of other readers expect: a
changed byte breaks a rule, a digest or a codec's parts, or turns a known version or element type into an unknown one.
"""

from __future__ import annotations

from typing import Any

DISTRIBUTION = "ingot"
"""The name of the distribution in ``pyproject.toml``."""

INGOT_VERSION = "0.1.0"
"""The version of the distribution; ``ingot.__version__`` repeats it."""


def install_hint(extra: str) -> str:
    """Return the command that installs what an extra brings."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def printable(text: str) -> str:
    """Show what would break or disguise a line (newlines, terminal sequences, lone surrogates) as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class IngotError(Exception):
    """Base class. ``exit_code`` is what the command line returns for it.

    Parameters
    ----------
    message : str
        What was expected, what was found, and what to do.
    rule : str, optional
        Stable identifier of the violated rule.
    where : str, optional
        File, tensor, field or byte offset.
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

    def at(self, where: str) -> IngotError:
        """Return self with ``where`` put in front of the present place; used where the outer layer knows more."""
        self.where = f"{where}: {self.where}" if self.where else where
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by state: the subclasses' constructors differ, and errors cross process borders."""
        return _revived, (type(self), self.args, dict(self.__dict__))


def _revived(kind: type[IngotError], args: tuple[Any, ...], state: dict[str, Any]) -> IngotError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class FormatError(IngotError, ValueError):
    """The bytes break a rule of their format."""

    def __init__(self, rule: str, message: str, *, where: str | None = None) -> None:
        super().__init__(message, rule=rule, where=where)


class IntegrityError(IngotError, ValueError):
    """The bytes are well-formed but not those that were promised (digest, length, a file that changed)."""

    def __init__(self, rule: str, message: str, *, where: str | None = None) -> None:
        super().__init__(message, rule=rule, where=where)


class CodecError(IngotError, ValueError):
    """A codec cannot encode these values or decode these parts."""

    def __init__(self, rule: str, message: str, *, where: str | None = None) -> None:
        super().__init__(message, rule=rule, where=where)


class UnsupportedError(IngotError, ValueError):
    """Well-formed, but Ingot has no decoder for it, or the target cannot carry it.

    A ``ValueError`` too: one changed byte makes a known version, element type or codec one that nobody knows.
    """


class UsageError(IngotError):
    """The call itself is wrong: an option, a name, a path."""

    exit_code = 2


class ResourceError(IngotError):
    """The machine said no: disk full, RAM ceiling too low, target not writable."""


class PluginError(IngotError):
    """An entry of an installed plugin cannot be used; the message names the plugin's distribution."""


class MissingExtraError(IngotError, ImportError):
    """An optional dependency is needed and not installed."""

    exit_code = 3

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is needed for this: {install_hint(extra)}", rule="extra.missing")
        self.extra = extra
