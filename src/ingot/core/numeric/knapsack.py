"""The multiple-choice knapsack: one choice for each item, at minimum cost, with a limit of the total size.

The linear relaxation is solved by the lower convex hulls of cost over size (Sinha and Zoltners, Operations Research 27,
1979). Its price of a unit of size gives a lower bound for the cost of each choice. Choices whose bound exceeds the best
solution are dropped. The remaining problem is solved by dynamic programming over undominated states (Pisinger, European
Journal of Operational Research 83, 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

# A first run with few states finds a solution by which the second run can drop most choices.
_STATES = (512, 1 << 15)
_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Allocation:
    """One choice (an index) for each item, with the total cost and size.

    ``bound`` is a lower bound of the minimum cost. It equals ``cost`` up to rounding, unless the number of states
    exceeded the limit.
    """

    picks: tuple[int, ...]
    cost: float
    size: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices of one item that can be part of a solution, in order of rising sizes and falling costs.

    A choice is left out if another one is neither larger nor more expensive. ``index`` is the index of each choice in
    the caller's list for this item.
    """

    index: Indices
    size: Numbers
    cost: Numbers


@dataclass(frozen=True, slots=True)
class _Increments:
    """The steps between neighboring choices on the lower hulls of all items, by the saving of cost per size.

    A step replaces the choice ``before`` of an item by the choice ``after``.
    """

    item: Indices
    before: Indices
    after: Indices
    size: Numbers
    cost: Numbers


def allocate(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], limit: float) -> Allocation | None:
    """Return the allocation of minimum cost whose total size is at most ``limit``; None if all allocations are larger.

    Parameters
    ----------
    costs, sizes : sequence of sequence of float
        The cost and size of each choice of each item, finite. Each item has at least one choice. Integers below 2**53
        are added exactly.
    limit : float
    """
    items = [_undominated(cost, size) for cost, size in zip(costs, sizes, strict=True)]
    if sum(item.size[0] for item in items) > limit:
        return None
    best, price = _relaxed(items, _increments(items), limit)
    bound = _bound(items, price, limit)
    for max_states in _STATES:
        best, is_optimal = _improved(items, best, (price, bound), limit, max_states)
        if is_optimal:
            bound = _sum(items, best)[0]
            break
    cost, size = _sum(items, best)
    picks = tuple(int(item.index[pick]) for item, pick in zip(items, best, strict=True))
    return Allocation(picks, cost, size, min(bound, cost))


def frontier(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]]) -> tuple[Numbers, Numbers]:
    """Return the sizes and costs of allocations on the lower hull of cost over size, in order of size."""
    items = [_undominated(cost, size) for cost, size in zip(costs, sizes, strict=True)]
    steps = _increments(items)
    cost, size = _sum(items, [0] * len(items))
    return (
        np.concatenate([[size], size + np.cumsum(steps.size)]),
        np.concatenate([[cost], cost + np.cumsum(steps.cost)]),
    )


def _undominated(costs: Sequence[float], sizes: Sequence[float]) -> _Choices:
    cost = np.array(costs, np.float64)
    size = np.array(sizes, np.float64)
    order = np.lexsort((cost, size))
    minimum = np.minimum.accumulate(cost[order])
    index = order[np.concatenate([[True], cost[order][1:] < minimum[:-1]])]
    return _Choices(index, size[index], cost[index])


def _hull(choices: _Choices) -> list[int]:
    """Return the choices on the lower hull of cost over size."""
    hull: list[int] = []
    for choice in range(len(choices.size)):
        while len(hull) > 1:
            first, second = hull[-2:]
            rise = (choices.cost[second] - choices.cost[first]) * (choices.size[choice] - choices.size[first])
            if rise < (choices.cost[choice] - choices.cost[first]) * (choices.size[second] - choices.size[first]):
                break
            hull.pop()
        hull.append(choice)
    return hull


def _increments(items: Sequence[_Choices]) -> _Increments:
    rows = [(n, before, after) for n, choices in enumerate(items) for before, after in pairwise(_hull(choices))]
    item, before, after = (np.array(column, np.int64) for column in (zip(*rows, strict=True) if rows else ((),) * 3))
    size = np.array([items[n].size[last] - items[n].size[first] for n, first, last in rows], np.float64)
    cost = np.array([items[n].cost[last] - items[n].cost[first] for n, first, last in rows], np.float64)
    order = np.lexsort((after, cost / size)) if rows else item
    return _Increments(item[order], before[order], after[order], size[order], cost[order])


def _relaxed(items: Sequence[_Choices], steps: _Increments, limit: float) -> tuple[list[int], float]:
    """Return choices that fit into ``limit``, taken greedily in the order of ``steps``, and the price of a unit of
    size.

    The price is the ratio of cost to size of the first step that does not fit. It is the dual solution of the linear
    relaxation.
    """
    picks = [0] * len(items)
    price = 0.0
    room = limit - sum(float(item.size[0]) for item in items)
    for index in range(len(steps.size)):
        item = int(steps.item[index])
        size = float(steps.size[index])
        if size > room:
            price = price or -float(steps.cost[index]) / size
        elif picks[item] == steps.before[index]:
            picks[item] = int(steps.after[index])
            room -= size
    return picks, price


def _bound(items: Sequence[_Choices], price: float, limit: float) -> float:
    return float(sum((item.cost + price * item.size).min() for item in items)) - price * limit


def _sum(items: Sequence[_Choices], picks: Sequence[int]) -> tuple[float, float]:
    cost = sum(float(item.cost[pick]) for item, pick in zip(items, picks, strict=True))
    return cost, sum(float(item.size[pick]) for item, pick in zip(items, picks, strict=True))


def _improved(
    items: Sequence[_Choices], best: list[int], relaxed: tuple[float, float], limit: float, max_states: int
) -> tuple[list[int], bool]:
    """Return the best choices found by dynamic programming, and whether they are proven to be optimal.

    At most ``max_states`` partial solutions are kept after each item.
    """
    price, bound = relaxed
    cost = _sum(items, best)[0]
    gap = cost - bound
    if gap <= _EPSILON * max(abs(cost), abs(bound)):
        return best, True
    # The cost of each choice beyond the relaxation. In a better solution all of them together are less than the gap.
    over = [item.cost + price * item.size for item in items]
    over = [excess - excess.min() for excess in over]
    remaining = [np.flatnonzero(excess < gap) for excess in over]
    order = sorted(
        (n for n in range(len(items)) if len(remaining[n]) > 1),
        key=lambda n: -float(np.ptp(items[n].size[remaining[n]])),
    )
    fixed = {n: int(remaining[n][0]) for n in range(len(items)) if len(remaining[n]) == 1}
    room = limit - sum(float(items[n].size[pick]) for n, pick in fixed.items())
    smallest = np.array([items[n].size[remaining[n]].min() for n in order])
    largest = np.array([items[n].size[remaining[n]].max() for n in order])
    # Total sizes of all items from a position on.
    smallest, largest = (np.append(np.cumsum(sizes[::-1])[::-1], 0.0) for sizes in (smallest, largest))
    size = np.zeros(1)
    beyond = np.zeros(1)
    is_optimal = True
    trail: list[tuple[Indices, Indices]] = []
    for position, n in enumerate(order):
        origin = np.tile(np.arange(len(size)), len(remaining[n]))
        choice = np.repeat(remaining[n], len(size))
        size = (size + items[n].size[remaining[n]][:, None]).reshape(-1)
        beyond = (beyond + over[n][remaining[n]][:, None]).reshape(-1)
        # Room that no choice of the later items can fill costs its price too.
        empty = np.maximum(room - size - largest[position + 1], 0.0)
        feasible = (size + smallest[position + 1] <= room) & (beyond + price * empty < gap)
        size = size[feasible]
        beyond = beyond[feasible]
        origin = origin[feasible]
        choice = choice[feasible]
        states = _front(size, beyond - price * size)
        if len(states) > max_states:
            states = _thinned(states, size, max_states)
            is_optimal = False
        size = size[states]
        beyond = beyond[states]
        trail.append((origin[states], choice[states]))
    if not len(size):
        return best, is_optimal
    state = int(np.argmin(beyond - price * size))
    picks = [fixed.get(n, 0) for n in range(len(items))]
    for n, (origin, choice) in zip(reversed(order), reversed(trail), strict=True):
        picks[n] = int(choice[state])
        state = int(origin[state])
    return (picks if _sum(items, picks)[0] < cost else best), is_optimal


def _front(size: Numbers, cost: Numbers) -> Indices:
    """Return the indices of the partial solutions that are cheaper than all smaller ones, in order of size."""
    order: Indices = np.lexsort((cost, size))
    if not len(order):
        return order
    falling = cost[order]
    states: Indices = order[np.concatenate([[True], falling[1:] < np.minimum.accumulate(falling)[:-1]])]
    return states


def _thinned(states: Indices, size: Numbers, max_states: int) -> Indices:
    """Return the cheapest of ``states`` in each of ``max_states`` equal ranges of size."""
    sizes = size[states]
    ranges = ((sizes - sizes[0]) * (max_states / (sizes[-1] - sizes[0]))).astype(np.int64)
    cheapest: Indices = states[np.append(ranges[1:] != ranges[:-1], True)]
    return cheapest
