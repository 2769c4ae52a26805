"""An explicit table from names to lazily imported objects: no scan of folders, no code from names in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ingot.errors import MissingExtraError, UsageError


class Registry(Mapping[str, Any]):
    """Maps an id to the object at ``"module:attribute"``, imported on first use.

    Parameters
    ----------
    kind : str
        What the ids name; used in messages.
    entries : sequence of (id, "module:attribute")
        A repeated id is an error.
    extras : mapping of top-level package to the extra that brings it
        Lets a failed import say what to install.
    """

    def __init__(
        self, kind: str, entries: tuple[tuple[str, str], ...], extras: Mapping[str, str] | None = None
    ) -> None:
        self._kind = kind
        self._paths: dict[str, str] = {}
        self._loaded: dict[str, Any] = {}
        self._extras = dict(extras or {})
        for name, path in entries:
            self.add(name, path)

    def add(self, name: str, path: str) -> None:
        """Add one entry; a known name is refused rather than replaced."""
        if name in self._paths:
            raise UsageError(
                f"{self._kind} {name!r} is already registered as {self._paths[name]}", rule="registry.duplicate"
            )
        self._paths[name] = path

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in self._paths:
                raise KeyError(name)
            module, _, attribute = self._paths[name].partition(":")
            try:
                self._loaded[name] = getattr(import_module(module), attribute)
            except ModuleNotFoundError as error:
                package = (error.name or "").partition(".")[0]
                if package in self._extras:
                    raise MissingExtraError(package, self._extras[package]) from error
                raise
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def get_or_refuse(self, name: str) -> Any:
        """Like ``[]``, with an error for people that lists what there is."""
        if name not in self._paths:
            raise UsageError(
                f"unknown {self._kind} {name!r}; known: {', '.join(self._paths)}", rule=f"{self._kind}.unknown"
            )
        return self[name]
