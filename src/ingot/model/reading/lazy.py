"""The one lazy mapping, of readers, ``ingot.open`` and views, and the one lazy sequence, of reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Many(Mapping[str, T], Generic[T]):
    """A mapping that can be iterated without creating or caching every value."""

    def passing(self, name: str) -> T:
        """Return a value that the mapping does not cache."""
        return self[name]

    def where(self, test: Callable[[T], bool]) -> list[str]:
        """Return the names of the values that pass a test."""
        return [name for name in self if test(self.passing(name))]

    def uncached(self) -> Iterator[T]:
        """Yield all values in order without caching any."""
        return map(self.passing, self)


class Made(Many[T]):
    """Values that are made each time that they are asked for; none is kept. Parameters as of ``Lazy``."""

    def __init__(self, names: Collection[str], make: Callable[[str], T]) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class MadeSequence(Sequence[T]):
    """Values that are made each time that they are asked for; equal to a list of the same."""

    __slots__ = ()

    @abstractmethod
    def _make(self, index: int) -> T:
        """Return one, ``index`` from 0 on."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(len(self))[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (MadeSequence, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return repr(list(self))


def as_many(values: Mapping[str, T]) -> Many[T]:
    """Return a mapping as one that may not want its values made or kept."""
    return values if isinstance(values, Many) else Made(values, values.__getitem__)


class Lazy(Made[T]):
    """A read-only mapping whose values are made one at a time: each when it is first asked for, and only once.

    Parameters
    ----------
    names : collection of str
        In order, each once, quick to search: a dict or another mapping. It may not change.
    make : callable
        Makes the value of a name. Of two threads that ask at the same time both may make one; both get the first.
    brief : callable, optional
        As ``make``, of a value that is kept: one that takes little memory before it is looked at.
    """

    def __init__(
        self,
        names: Collection[str],
        make: Callable[[str], T],
        brief: Callable[[str], T] | None = None,
    ) -> None:
        super().__init__(names, make)
        self._brief = brief or make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        made = self._made.get(name)
        if made is not None:
            return made
        if name not in self._names:
            raise KeyError(name)
        return self._made.setdefault(name, self._brief(name))

    def passing(self, name: str) -> T:
        made = self._made.get(name)
        return self._make(name) if made is None else made
