"""The mapping whose values are made when they are asked for."""

from __future__ import annotations

import pytest

from ingot.model.reading.lazy import LazyMap


def test_values_are_made_on_first_access_and_once() -> None:
    made: list[str] = []

    def make(name: str) -> list[str]:
        made.append(name)
        return [name]

    lazy = LazyMap({"b": 0, "a": 0}, make)
    assert (list(lazy), len(lazy), "a" in lazy, "c" in lazy, made) == (["b", "a"], 2, True, False, [])
    first = lazy["a"]
    assert lazy["a"] is first
    assert made == ["a"]
    with pytest.raises(KeyError):
        lazy["c"]
    assert made == ["a"]
    assert dict(lazy) == {"b": ["b"], "a": ["a"]}
