"""Parts of tensors that are built on first access, because most operations on a list of tensors need few parts."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from ingot.model.part import Part

Parts = dict[str, Part]


class LazyParts(Mapping[str, Part]):
    """A mapping of role to part that builds and caches all parts on the first access to one of them.

    Parameters
    ----------
    roles : tuple of str
    make : callable
        Builds the parts from ``name`` and ``row``. If two threads call it at once, one result is cached.
    name : str
        The name of the tensor.
    row : int
        The row of the tensor in the reader's table.
    """

    __slots__ = ("_make", "_name", "_parts", "_roles", "_row")

    def __init__(self, roles: tuple[str, ...], make: Callable[[str, int], Parts], name: str, row: int) -> None:
        self._roles = roles
        self._make = make
        self._name = name
        self._row = row
        self._parts: Parts | None = None

    def _get_parts(self) -> Parts:
        parts = self._parts
        if parts is None:
            parts = self._parts = self._make(self._name, self._row)
        return parts

    def __getitem__(self, role: str) -> Part:
        return self._get_parts()[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)

    def __contains__(self, role: object) -> bool:
        return role in self._roles

    def items(self) -> ItemsView[str, Part]:
        return self._get_parts().items()

    def values(self) -> ValuesView[Part]:
        return self._get_parts().values()

    def __repr__(self) -> str:
        return repr(self._get_parts())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._get_parts(),)
