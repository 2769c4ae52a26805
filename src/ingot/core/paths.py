"""The one place where what a user gave as a path becomes one."""

from __future__ import annotations

import os
from pathlib import Path

from ingot.errors import UsageError


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file or folder, which need not exist.

    Raises ``UsageError`` ``store.path`` for what the system cannot name a file by: no text, or text with a NUL.
    """
    text = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"expected a path, found {repr(path)[:200]}", rule="store.path")
    return Path(text)
