"""Equal layers as one: what differs in the numbers of names only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ingot.naming.names import pattern_of

Item = TypeVar("Item")
Groups = list[tuple[str, list[Item]]]


def equal_layers(items: Iterable[Item], name: Callable[[Item], str], key: Callable[[Item], Any]) -> Groups[Item]:
    """Group items that differ in the numbers of their names only: ``model.layers.*.mlp.up_proj.weight`` and its items.

    Parameters
    ----------
    items : iterable
        Tensors, or what stands for them, in the order of the table.
    name, key : callable
        The tensor's name of an item; what else must be equal.

    Returns
    -------
    list of (str, list)
        The pattern (of one item its name) and the items.
    """
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault((pattern_of(name(item)), key(item)), []).append(item)
    return [(name(group[0]) if len(group) == 1 else pattern, group) for (pattern, _), group in groups.items()]
