"""The one lazy mapping: what readers, ``ingot.open`` and views hand out under names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazy(Mapping[str, T], Generic[T]):
    """A read-only mapping whose values are made one at a time: each when it is first asked for, and only once.

    Parameters
    ----------
    names : collection of str
        In order, each once, quick to search: a dict or another mapping. It may not change.
    make : callable
        Makes the value of a name. Of two threads that ask at the same time both may make one; both get the first.
    """

    def __init__(self, names: Collection[str], make: Callable[[str], T]) -> None:
        self._names, self._make = names, make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        made = self._made.get(name)
        if made is not None:
            return made
        if name not in self._names:
            raise KeyError(name)
        return self._made.setdefault(name, self._make(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names
