"""An explicit table from names to lazily imported objects: no scan of folders, no code from names in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from ingot.core.suggest import did_you_mean
from ingot.errors import UsageError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Maps an id to the object at ``"module:attribute"``, imported on first use.

    Parameters
    ----------
    kind : str
        What the ids name; used in messages and in the rule ``KIND.unknown``.
    entries : sequence of (id, "module:attribute")
        A repeated id is an error.
    """

    def __init__(self, kind: str, entries: tuple[tuple[str, str], ...]) -> None:
        self._kind = kind
        self._paths: dict[str, str] = {}
        self._loaded: dict[str, T] = {}
        for name, path in entries:
            self.add(name, path)

    def add(self, name: str, path: str) -> None:
        """Add one entry; a known name is refused rather than replaced."""
        if name in self._paths:
            raise UsageError(
                f"{self._kind} {name!r} is already registered as {self._paths[name]}", rule="registry.duplicate"
            )
        self._paths[name] = path

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            module, _, attribute = self._paths[name].partition(":")
            self._loaded[name] = self._make(name, getattr(import_module(module), attribute))
        return self._loaded[name]

    def _make(self, name: str, target: Any) -> T:
        """Turn the attribute that was found into the entry's value."""
        value: T = target
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def get_or_refuse(self, name: str) -> T:
        """Like ``[]``, with an error for people that lists what there is."""
        if name not in self._paths:
            raise UsageError(
                f"unknown {self._kind} {name!r}{did_you_mean(name, self._paths)}; known: {', '.join(self._paths)}",
                rule=f"{self._kind}.unknown",
            )
        return self[name]


class Instances(Registry[T]):
    """A registry of classes without state: one object of each serves everybody, threads included."""

    def _make(self, name: str, target: Any) -> T:
        value: T = target()
        return value
