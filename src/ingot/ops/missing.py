"""The error for a location without a file or folder, with a hint at what the user may have meant."""

from __future__ import annotations

from ingot.core.suggest import did_you_mean
from ingot.errors import IngotError, UsageError, install_hint
from ingot.stores.location import Location
from ingot.stores.table import STORES

_LOCAL = ("file", "memory")


def missing_error(location: Location, error: IngotError | None = None) -> UsageError:
    """Return the error for a location without a file or folder; ``error`` is the error of its store.

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
    hint, names = "", location.siblings() if location.given else None
    if location.may_be_hub_id and names is None:
        hint = f"; to read a model of the Hugging Face Hub by its name: {install_hint('hub')}"
    elif names:
        hint = did_you_mean(location.name, names)
    return UsageError(f"no such file or folder{hint}", rule="open.missing", where=location.display or "''")
