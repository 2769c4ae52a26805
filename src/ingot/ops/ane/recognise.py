"""Which files are a Neural Engine's own, by their first bytes: asked of every file that is inspected."""

from __future__ import annotations

from typing import Literal

from ingot.errors import IngotError
from ingot.formats.anek.header import is_unit
from ingot.model.store import Store
from ingot.targets.ane.program import HEAD, is_program

_HEAD = max(16, len(HEAD))


def kind_of(store: Store, name: str) -> Literal["kernel", "program", ""]:
    """Return whether a file begins as a kernel unit or a compiled program does; empty for others, and for a folder."""
    try:
        head = store.head(name, _HEAD) if name else b""
    except IngotError:
        return ""  # whoever opens it next says why
    return "kernel" if is_unit(head) else "program" if is_program(head) else ""
