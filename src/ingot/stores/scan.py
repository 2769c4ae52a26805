"""What lies in folders of the local file system."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ingot.core.files.oserrors import read_error


def tree(folder: str, prefix: str) -> Iterator[str]:
    """Yield ``prefix`` and the names of all that lies in a folder, at any depth, as ``Store.tree`` does."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise read_error(error, folder) from error
    if prefix and not entries:
        yield prefix
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from tree(entry.path, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name


def is_regular(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file, or a link to one."""
    try:
        return entry.is_file()
    except OSError:  # a link in a circle
        return False


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False
