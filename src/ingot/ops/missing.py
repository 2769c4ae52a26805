"""What to say of a path where there is nothing: it may be an address, a model's id on a hub, or a slip."""

from __future__ import annotations

import re

from ingot.core.suggest import did_you_mean
from ingot.errors import IngotError, UsageError, install_hint
from ingot.stores.table import STORES, beside, location_of

_OWN = ("file", "memory")
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://.*", re.IGNORECASE)
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def missing_path(text: str, found: IngotError | None = None) -> IngotError:
    """Return the refusal of a path where there is no file or folder; ``found`` is what its store said.

    Returns
    -------
    UsageError
        ``open.url``: an address of a kind that is not read; ``open.missing``: anything else, with what may have been
        meant.
    """
    address = _ADDRESS.fullmatch(text)
    if address is not None and address[1].lower() in STORES:
        message = "expected a file or folder at this address, found none" if found is None else found.message
        return UsageError(message, rule="open.missing", where=location_of(text))
    if address is not None:
        return UsageError(
            "expected a file or folder of this machine, or an address of a kind that is read "
            f"({', '.join(f'{known}:' for known in STORES if known not in _OWN)}); download it first, and give "
            "the path",
            rule="open.url",
            where=location_of(text),
        )
    hint, near = "", beside(text) if text else None
    if _ID.fullmatch(text) and near is None:
        hint = f"; to read a model of the Hugging Face Hub by its name: {install_hint('hub')}"
    elif near:
        last = text.rstrip("/").rpartition("/")[2]
        hint = did_you_mean(last, near)
    return UsageError(f"no such file or folder{hint}", rule="open.missing", where=text or "''")
