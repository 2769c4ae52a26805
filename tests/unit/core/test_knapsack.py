"""The multiple-choice knapsack against all combinations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.numeric.knapsack import allocate, frontier

Ways = list[list[tuple[int, int]]]
WAYS = st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4), max_size=5)


def split(ways: Ways) -> tuple[list[list[float]], list[list[float]]]:
    return [[cost / 7 for cost, _ in each] for each in ways], [[float(size) for _, size in each] for each in ways]


def least(ways: Ways, limit: float) -> float | None:
    fitting = [sum(cost for cost, _ in picked) for picked in product(*ways) if sum(size for _, size in picked) <= limit]
    return min(fitting) / 7 if fitting else None


@settings(max_examples=60)
@given(WAYS, st.integers(0, 60))
def test_no_combination_is_cheaper(ways: Ways, limit: int) -> None:
    costs, sizes = split(ways)
    found, wanted = allocate(costs, sizes, limit), least(ways, limit)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.cost == pytest.approx(wanted)
        assert found.bound == pytest.approx(wanted)
        assert found.size == sum(each[pick] for each, pick in zip(sizes, found.picks, strict=True)) <= limit
        assert found.cost == pytest.approx(sum(each[pick] for each, pick in zip(costs, found.picks, strict=True)))


@settings(max_examples=25)
@given(WAYS)
def test_points_of_the_frontier_are_the_best_of_their_size(ways: Ways) -> None:
    sizes, costs = frontier(*split(ways))
    assert (np.diff(sizes) >= 0).all()
    for size, cost in zip(sizes, costs, strict=True):
        assert least(ways, size) == pytest.approx(cost)


def test_a_known_answer() -> None:
    """By gain for size alone the first thing would be raised, and room left over."""
    costs, sizes = [[10.0, 4.0], [10.0, 5.0], [10.0, 5.5]], [[1, 6], [1, 6], [1, 6]]
    found = allocate(costs, sizes, 13)
    assert found is not None
    assert found.picks == (1, 1, 0)
    greedy = allocate([[9.0, 2.0], [9.0, 0.0]], [[0, 6], [0, 10]], 10)
    assert greedy is not None
    assert greedy.picks == (0, 1)


def test_a_thousand_things_of_twelve_ways_are_solved_to_the_bound() -> None:
    random = np.random.default_rng(0)
    weights = random.choice([4096 * 4096, 4096 * 1024, 4096 * 14336], 1000)
    bits = np.array([2.25, 2.5, 3.25, 3.5, 4.25, 4.5, 5.25, 5.5, 6.25, 6.56, 8.01, 16])
    sizes = [[float(int(count * each / 8)) for each in bits] for count in weights]
    costs = [list(np.exp(random.normal()) * 4.0**-bits * np.exp(random.normal(0, 0.1, 12))) for _ in weights]
    limit = int(weights.sum() * 3.5 / 8)
    found = allocate(costs, sizes, limit)
    assert found is not None
    assert found.size <= limit
    assert found.cost == pytest.approx(found.bound, rel=1e-9)
