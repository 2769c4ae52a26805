"""Mappings and sequences whose values are computed on access, for tensors of large checkpoints and rows of reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class TensorMap(Mapping[str, T], Generic[T]):
    """A mapping that can be iterated without creating or caching every value."""

    def get_uncached(self, name: str) -> T:
        """Return a value without caching it."""
        return self[name]

    def names_where(self, test: Callable[[T], bool]) -> list[str]:
        """Return the names of the values for which ``test`` returns True; caches no value."""
        return [name for name in self if test(self.get_uncached(name))]

    def uncached(self) -> Iterator[T]:
        """Yield all values in order without caching any."""
        return map(self.get_uncached, self)


class ComputedMap(TensorMap[T]):
    """A read-only mapping that computes a value on each access and caches none.

    Parameters
    ----------
    names : collection of str
        The ordered names without duplicates; a dict or another mapping makes lookups fast. It must not change.
    make : callable
        Returns the value for a name.
    """

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


class ComputedSequence(Sequence[T]):
    """A sequence that computes an item on each access; equal to a list of the same items."""

    __slots__ = ()

    @abstractmethod
    def _make(self, index: int) -> T:
        """Return the item at ``index``, which is not negative."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        indices = range(len(self))[index]
        return self._make(indices) if isinstance(indices, int) else [self._make(item) for item in indices]

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(len(self)))

    def __eq__(self, sequence: object) -> bool:
        return list(self) == list(sequence) if isinstance(sequence, (ComputedSequence, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a list

    def __repr__(self) -> str:
        return repr(list(self))


def as_tensor_map(values: Mapping[str, T]) -> TensorMap[T]:
    """Return a mapping as a ``TensorMap``; a mapping of another type is wrapped."""
    return values if isinstance(values, TensorMap) else ComputedMap(values, values.__getitem__)


class LazyMap(ComputedMap[T]):
    """A read-only mapping that computes a value on first access and caches it.

    Parameters
    ----------
    names : collection of str
        The ordered names without duplicates; a dict or another mapping makes lookups fast. It must not change.
    make : callable
        Builds the value for a name. If two threads ask at once, both may build it; both get the first one stored.
    brief : callable, optional
        Builds the values that are cached, by default ``make``. It should be cheaper, and its values should need little
        memory until they are used. ``make`` still builds the values that are not cached.
    """

    def __init__(
        self,
        names: Collection[str],
        make: Callable[[str], T],
        brief: Callable[[str], T] | None = None,
    ) -> None:
        super().__init__(names, make)
        self._brief = brief or make
        self._values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        value = self._values.get(name)
        if value is not None:
            return value
        if name not in self._names:
            raise KeyError(name)
        return self._values.setdefault(name, self._brief(name))

    def get_uncached(self, name: str) -> T:
        value = self._values.get(name)
        return self._make(name) if value is None else value
