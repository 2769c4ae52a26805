"""The one place where what a user gave as a path becomes one."""

from __future__ import annotations

import os
from pathlib import Path

from ingot.errors import UsageError


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file or folder, which need not exist.

    Raises ``UsageError`` ``store.path`` for what the system cannot name a file by: no text, text with a NUL, or half of
    a pair of surrogates, as JSON may have it. Bytes that are not UTF-8 are what ``os.fsdecode`` makes of them.
    """
    text = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(text, str) or "\0" in text or not _is_encodable(text):
        raise UsageError(f"expected a path, found {repr(path)[:200]}", rule="store.path")
    return Path(text)


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
