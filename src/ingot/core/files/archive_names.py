"""Names in an archive: those that can be unpacked everywhere, each once (``core.archive``)."""

from __future__ import annotations

import unicodedata

from ingot.core.files.system import is_name
from ingot.errors import FormatError

MOST_ENTRIES = 65_536
"""Files and folders that an archive may hold."""


class Names:
    """The names so far; refuses what could leave the folder or fall together on any file system."""

    def __init__(self) -> None:
        self._spelling: dict[str, str] = {}
        self._entries: set[str] = set()
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, name: str) -> None:
        """Take in one entry; a folder's name ends with a slash."""
        path = name.removesuffix("/")
        pieces = path.split("/")
        if (
            any(piece in ("", ".", "..") for piece in pieces)
            or not name.isprintable()
            or set(name) & set("\\:")
            or not all(map(is_name, pieces))
        ):
            raise FormatError(
                "archive.name", "expected a relative path without '..', backslash, colon or control", where=name[:200]
            )
        if len(name.encode()) > 1024:
            raise FormatError("archive.name", "expected a name of at most 1024 bytes", where=name[:200])
        folders = ["/".join(pieces[:depth]) for depth in range(1, len(pieces))]
        for prefix in (*folders, path):
            folded = unicodedata.normalize("NFC", prefix).casefold()
            if self._spelling.setdefault(folded, prefix) != prefix:
                raise FormatError(
                    "archive.collision", f"expected names that differ by more than case, found {prefix!r}", where=name
                )
        if name in self._entries:
            raise FormatError("archive.duplicate", "expected every name once, found one twice", where=name)
        self._entries.add(name)
        is_folder = name.endswith("/")
        if path in (self._files if is_folder else self._folders) or self._files & set(folders):
            raise FormatError("archive.conflict", "expected a name to be a file or a folder, found both", where=name)
        self._folders.update(folders)
        (self._folders if is_folder else self._files).add(path)
        if len(self._folders) + len(self._files) > MOST_ENTRIES:  # a name of 1 KiB can make 500 folders
            raise FormatError(
                "archive.entries", f"expected at most {MOST_ENTRIES} files and folders, found more", where=name[:200]
            )
