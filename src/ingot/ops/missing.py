"""What to say of a path where there is nothing: it may be an address, a model's id on a hub, or a slip."""

from __future__ import annotations

import re

from ingot.core.suggest import did_you_mean
from ingot.errors import IngotError, UsageError
from ingot.stores.table import STORES, beside, location_of

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]+)/?(.*)", re.IGNORECASE)
_HUBS = ("huggingface.co", "hf.co", "www.huggingface.co", "hf-mirror.com")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def missing_path(text: str) -> IngotError:
    """Return the refusal of a path where there is no file or folder.

    Returns
    -------
    UsageError
        ``open.url``: an address of a kind that is not read; ``open.missing``: anything else, with what may have been
        meant.
    """
    address = _ADDRESS.fullmatch(text)
    if address is not None and address[1].lower() in STORES:
        return UsageError(
            "expected a file or folder at this address, found none", rule="open.missing", where=location_of(text)
        )
    if address is not None:
        scheme, host, rest = address[1].lower(), address[2], address[3]
        inside = rest if host.lower() in _HUBS else f"{host}/{rest}" if scheme == "hf" else ""
        match = _ID.match(inside)
        return UsageError(
            f"expected a file or folder of this machine, found an address; download it first{_download(match)}",
            rule="open.url",
            where=text[:200],
        )
    hint, near = "", beside(text) if text else None
    if _ID.fullmatch(text) and near is None:
        hint = f"; if it is a model's id on the Hugging Face Hub, download it first{_download(_ID.match(text))}"
    elif near:
        last = text.rstrip("/").rpartition("/")[2]
        hint = did_you_mean(last, near)
    return UsageError(f"no such file or folder{hint}", rule="open.missing", where=text or "''")


def _download(match: re.Match[str] | None) -> str:
    if match is None:
        return " and give the path"
    name = match[0].rpartition("/")[2]
    return f": `hf download {match[0]} --local-dir {name}`, and give the folder {name}"
