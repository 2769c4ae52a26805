"""Parts of a tensor that are made when they are first asked for: whoever lists tensors looks at few of them."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from ingot.model.part import Part

Parts = dict[str, Part]


class LateParts(Mapping[str, Part]):
    """A mapping of role to part that is known by its roles until a part is asked for; then all are made, and kept.

    Parameters
    ----------
    roles : tuple of str
    make : callable
        Makes the parts of a tensor from its name and its row. Of two threads that ask at once, either's are kept.
    """

    __slots__ = ("_made", "_make", "_name", "_roles", "_row")

    def __init__(self, roles: tuple[str, ...], make: Callable[[str, int], Parts], name: str, row: int) -> None:
        self._roles = roles
        self._make = make
        self._name = name
        self._row = row
        self._made: Parts | None = None

    def _all(self) -> Parts:
        made = self._made
        if made is None:
            made = self._made = self._make(self._name, self._row)
        return made

    def __getitem__(self, role: str) -> Part:
        return self._all()[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)

    def __contains__(self, role: object) -> bool:
        return role in self._roles

    def items(self) -> ItemsView[str, Part]:
        return self._all().items()

    def values(self) -> ValuesView[Part]:
        return self._all().values()

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._all(),)
