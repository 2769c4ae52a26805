"""The one lazy mapping, of readers, ``ingot.open`` and views, and the one lazy sequence, of reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

from ingot.model.bulk import Bulk

T = TypeVar("T")


class Many(Mapping[str, T], Generic[T]):
    """A mapping of so many values that whoever goes over all of them does not want each one made, or kept."""

    def kind(self, name: str) -> Hashable:
        """Return what a value shares with those that differ from it in name, place and digest alone; None where it may
        be the only one. Cheaper than the value."""
        return None

    @property
    def bulk(self) -> Bulk | None:
        """Where those of the values lie that can be read together; None where nobody knows."""
        return None

    def passing(self, name: str) -> T:
        """Return a value for somebody who does not keep it: nor does the mapping."""
        return self[name]

    def where(self, test: Callable[[T], bool]) -> list[str]:
        """Return the names of the values that pass a test, which is made once of those of a kind."""
        known: dict[Hashable, bool] = {}
        bulk = self.bulk
        if bulk is not None:
            values, _, others = bulk.counted(None)
            passing = [name for name in values if test(self.passing(name))]
            if not passing and not others:  # asked of most files, for what few have
                return []
        found = []
        for name in self:
            kind = self.kind(name)
            passes = None if kind is None else known.get(kind)
            if passes is None:
                passes = known[kind] = test(self.passing(name))
            if passes:
                found.append(name)
        return found

    def counted(self, names: Iterable[str] | None = None) -> tuple[list[T], list[int]]:
        """Return a value of each kind, and how many there are of it among ``names``, by default all."""
        values: list[T] = []
        counts: list[int] = []
        known: dict[Hashable, int] = {}
        bulk = self.bulk
        if bulk is not None:
            alike, counts, names = bulk.counted(names)
            values = [self.passing(name) for name in alike]
        for name in self if names is None else names:
            kind = self.kind(name)
            number = None if kind is None else known.get(kind)
            if number is None:
                known[kind] = len(values)
                values.append(self.passing(name))
                counts.append(1)
            else:
                counts[number] += 1
        return values, counts

    def total(self, count: Callable[[T], int]) -> int:
        """Return the sum of what ``count`` gives of all values, which is asked once of those of a kind."""
        return sum(number * count(value) for value, number in zip(*self.counted(), strict=True))


class Made(Many[T]):
    """Values that are made each time that they are asked for; none is kept. Parameters as of ``Lazy``."""

    def __init__(
        self, names: Collection[str], make: Callable[[str], T], kind: Callable[[str], Hashable] | None = None
    ) -> None:
        self._names, self._make, self._kind = names, make, kind

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

    def kind(self, name: str) -> Hashable:
        return None if self._kind is None else self._kind(name)


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
    kind : callable, optional
        See ``Many.kind``.
    bulk : callable, optional
        See ``Many.bulk``; asked once.
    brief : callable, optional
        As ``make``, of a value that is kept: one that takes little memory before it is looked at.
    """

    def __init__(
        self,
        names: Collection[str],
        make: Callable[[str], T],
        kind: Callable[[str], Hashable] | None = None,
        bulk: Callable[[], Bulk | None] | None = None,
        brief: Callable[[str], T] | None = None,
    ) -> None:
        super().__init__(names, make, kind)
        self._brief, self._find_bulk = brief or make, bulk
        self._bulk: Bulk | None = None
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        made = self._made.get(name)
        if made is not None:
            return made
        if name not in self._names:
            raise KeyError(name)
        return self._made.setdefault(name, self._brief(name))

    @property
    def bulk(self) -> Bulk | None:
        find = self._find_bulk
        if find is not None:
            self._bulk = find()
            self._find_bulk = None
        return self._bulk

    def passing(self, name: str) -> T:
        made = self._made.get(name)
        return self._make(name) if made is None else made
