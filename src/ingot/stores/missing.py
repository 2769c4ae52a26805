"""Errors for paths and addresses that do not exist; the command line raises them before heavy imports."""

from __future__ import annotations

from pathlib import Path

from ingot.core.registry import did_you_mean
from ingot.errors import IngotError, UsageError, install_hint
from ingot.stores.location import AnyPath, Location
from ingot.stores.scheme import STORES

_LOCAL = ("file", "memory")


def missing_error(location: Location, error: IngotError | None = None) -> UsageError:
    """Return the error for a location that does not exist; ``error`` is the error of its store.

    Returns
    -------
    UsageError
        ``open.url``: an address of an unknown scheme; ``open.missing``: anything else.
    """
    if not location.scheme:
        return UsageError(
            "Ingot reads paths, and addresses that begin with "
            f"{', '.join(f'{name}:' for name in STORES if name not in _LOCAL)}; download it first, and give the path",
            rule="open.url",
            where=location.display,
        )
    if location.text.partition("://")[0].lower() == location.scheme:
        message = "there is no file or folder at this address" if error is None else error.message
        return UsageError(message, rule="open.missing", where=location.display)
    hint = ""
    names = location.siblings() if location.user_text else None
    if location.may_be_hub_id and names is None:
        hint = f"; to read a model of the Hugging Face Hub by its name: {install_hint('hub')}"
    elif names:
        hint = did_you_mean(location.name, names)
    return UsageError(f"no such file or folder{hint}", rule="open.missing", where=location.display or "''")


def require_local(path: AnyPath) -> None:
    """Raise ``UsageError`` ``open.missing`` if a local path does not exist; sends no request.

    Addresses, the empty path, and texts that may name a model of the Hub are not checked.
    """
    location = Location.parse(path)
    if location.scheme != _LOCAL[0] or not location.user_text or "://" in location.text:
        return
    try:
        Path(location.text).stat()
    except (FileNotFoundError, NotADirectoryError):
        if not location.may_be_hub_id or location.siblings() is not None:
            raise missing_error(location) from None
    except OSError:  # the command will report it
        return
