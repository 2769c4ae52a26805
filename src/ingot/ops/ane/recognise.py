"""Which files are a Neural Engine's own, by their first bytes: asked of every file that is inspected."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

from ingot.errors import IngotError
from ingot.formats.anek.header import is_unit
from ingot.model.store import Store
from ingot.stores.table import locate_file
from ingot.targets.ane.program import HEAD, is_program

_HEAD = 16


def is_kernel_file(path: str | PathLike[str]) -> bool:
    """Whether a path is a file that begins as a kernel unit does."""
    return _begins(path, is_kernel)


def is_program_file(path: str | PathLike[str]) -> bool:
    """Whether a path is a file that begins as a compiled program does."""
    return _begins(path, lambda store, name: is_program(store.head(name, len(HEAD))))


def is_kernel(store: Store, name: str) -> bool:
    """Whether a file of a store begins as a kernel unit does; one that cannot be read does not."""
    try:
        return is_unit(store.head(name, _HEAD))
    except IngotError:
        return False  # whoever opens it next says why


def _begins(path: str | PathLike[str], is_one: Callable[[Store, str], bool]) -> bool:
    try:
        return is_one(*locate_file(path))
    except IngotError:
        return False  # whoever opens it next says why
