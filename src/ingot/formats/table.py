"""The one table of formats. A new format is a folder and a line here."""

from __future__ import annotations

from typing import Any

from ingot.core.registry import Registry
from ingot.formats.base import Format


class _Formats(Registry):
    """Maps a format's name to its one instance; formats hold no state."""

    def __getitem__(self, name: str) -> Any:
        kind = super().__getitem__(name)
        if name not in self._instances:
            made: Format = kind()
            self._instances[name] = made
        return self._instances[name]

    def __init__(self, kind: str, entries: tuple[tuple[str, str], ...]) -> None:
        self._instances: dict[str, Format] = {}
        super().__init__(kind, entries)


FORMATS = _Formats(
    "format",
    (
        ("zt", "ingot.formats.zt.format:ZtFormat"),
        ("safetensors", "ingot.formats.safetensors.format:SafetensorsFormat"),
    ),
)
