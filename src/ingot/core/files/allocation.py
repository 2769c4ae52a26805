"""One of several ways for each of many things, at the least cost within a limit: the multiple-choice knapsack.

The linear relaxation is solved by its hull (Sinha and Zoltners, Operations Research 27, 1979). Its price of a unit of
size tells of every way what it costs beyond the relaxation at least; ways that cost more than the best answer so far
are left out, and the rest is solved by dynamic programming over states that no other dominates (Pisinger, European
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

# A first run with few states finds an answer by which the second one leaves out nearly all ways.
_STATES = (512, 1 << 15)
_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Allocation:
    """A way for each thing, what they cost and take together, and ``bound``: no allocation costs less.

    ``bound`` is ``cost``, up to rounding, unless there were more states than are kept.
    """

    picks: tuple[int, ...]
    cost: float
    size: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Ways:
    """Ways of one thing that no other dominates, sizes rising and costs falling; ``index`` in what was given."""

    index: Indices
    size: Numbers
    cost: Numbers


@dataclass(frozen=True, slots=True)
class _Increments:
    """Steps along the lower hulls of all things, the most gain for their size first: thing, way before and after."""

    thing: Indices
    before: Indices
    after: Indices
    size: Numbers
    cost: Numbers


def allocate(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], limit: float) -> Allocation | None:
    """Return the least cost at which all sizes together are at most ``limit``; None where the smallest are more.

    Parameters
    ----------
    costs, sizes : for each thing, for each of its ways
        Finite; whole numbers below 2**53 are added exactly. At least one way each.
    limit : float
    """
    ways = [_undominated(one, two) for one, two in zip(costs, sizes, strict=True)]
    if sum(each.size[0] for each in ways) > limit:
        return None
    best, price = _relaxed(ways, _increments(ways), limit)
    bound = _bound(ways, price, limit)
    for most in _STATES:
        best, whole = _improved(ways, best, (price, bound), limit, most)
        if whole:
            bound = _sum(ways, best)[0]
            break
    cost, size = _sum(ways, best)
    picks = tuple(int(each.index[way]) for each, way in zip(ways, best, strict=True))
    return Allocation(picks, cost, size, min(bound, cost))


def frontier(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]]) -> tuple[Numbers, Numbers]:
    """Return sizes and costs of allocations than which none is both smaller and cheaper, from the smallest on."""
    ways = [_undominated(one, two) for one, two in zip(costs, sizes, strict=True)]
    steps = _increments(ways)
    least = _sum(ways, [0] * len(ways))
    return (
        np.concatenate([[least[1]], least[1] + np.cumsum(steps.size)]),
        np.concatenate([[least[0]], least[0] + np.cumsum(steps.cost)]),
    )


def _undominated(costs: Sequence[float], sizes: Sequence[float]) -> _Ways:
    cost = np.array(costs, np.float64)
    size = np.array(sizes, np.float64)
    order = np.lexsort((cost, size))
    least = np.minimum.accumulate(cost[order])
    kept = order[np.concatenate([[True], cost[order][1:] < least[:-1]])]
    return _Ways(kept, size[kept], cost[kept])


def _hull(ways: _Ways) -> list[int]:
    """Return the ways on the lower hull of cost over size."""
    found: list[int] = []
    for way in range(len(ways.size)):
        while len(found) > 1:
            one, two = found[-2:]
            rise = (ways.cost[two] - ways.cost[one]) * (ways.size[way] - ways.size[one])
            if rise < (ways.cost[way] - ways.cost[one]) * (ways.size[two] - ways.size[one]):
                break
            found.pop()
        found.append(way)
    return found


def _increments(ways: Sequence[_Ways]) -> _Increments:
    rows = [(thing, one, two) for thing, each in enumerate(ways) for one, two in pairwise(_hull(each))]
    thing, before, after = (np.array(column, np.int64) for column in (zip(*rows, strict=True) if rows else ((),) * 3))
    size = np.array([ways[n].size[two] - ways[n].size[one] for n, one, two in rows], np.float64)
    cost = np.array([ways[n].cost[two] - ways[n].cost[one] for n, one, two in rows], np.float64)
    order = np.lexsort((after, cost / size)) if rows else thing
    return _Increments(thing[order], before[order], after[order], size[order], cost[order])


def _relaxed(ways: Sequence[_Ways], steps: _Increments, limit: float) -> tuple[list[int], float]:
    """Return a feasible answer near the relaxation's, and the relaxation's price of a unit of size."""
    picks = [0] * len(ways)
    price = 0.0
    room = limit - sum(float(each.size[0]) for each in ways)
    for number in range(len(steps.size)):
        thing = int(steps.thing[number])
        size = float(steps.size[number])
        if size > room:
            price = price or -float(steps.cost[number]) / size
        elif picks[thing] == steps.before[number]:
            picks[thing] = int(steps.after[number])
            room -= size
    return picks, price


def _bound(ways: Sequence[_Ways], price: float, limit: float) -> float:
    return float(sum((each.cost + price * each.size).min() for each in ways)) - price * limit


def _sum(ways: Sequence[_Ways], picks: Sequence[int]) -> tuple[float, float]:
    cost = sum(float(each.cost[way]) for each, way in zip(ways, picks, strict=True))
    return cost, sum(float(each.size[way]) for each, way in zip(ways, picks, strict=True))


def _improved(
    ways: Sequence[_Ways], best: list[int], relaxed: tuple[float, float], limit: float, most: int
) -> tuple[list[int], bool]:
    """Return the best answer of at most ``most`` states after each thing, and whether none better can be."""
    (price, bound), cost = relaxed, _sum(ways, best)[0]
    gap = cost - bound
    if gap <= _EPSILON * max(abs(cost), abs(bound)):
        return best, True
    # What each way costs beyond the relaxation; an answer that is better than the best has less than the gap of it.
    over = [each.cost + price * each.size for each in ways]
    over = [each - each.min() for each in over]
    left = [np.flatnonzero(each < gap) for each in over]
    order = sorted(
        (n for n in range(len(ways)) if len(left[n]) > 1), key=lambda n: -float(np.ptp(ways[n].size[left[n]]))
    )
    fixed = {n: int(left[n][0]) for n in range(len(ways)) if len(left[n]) == 1}
    room = limit - sum(float(ways[n].size[way]) for n, way in fixed.items())
    least = np.array([ways[n].size[left[n]].min() for n in order])
    more = np.array([ways[n].size[left[n]].max() for n in order])
    least, more = (np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (least, more))
    size = np.zeros(1)
    beyond = np.zeros(1)
    whole = True
    trail: list[tuple[Indices, Indices]] = []
    for place, n in enumerate(order):
        came = np.tile(np.arange(len(size)), len(left[n]))
        way = np.repeat(left[n], len(size))
        size = (size + ways[n].size[left[n]][:, None]).reshape(-1)
        beyond = (beyond + over[n][left[n]][:, None]).reshape(-1)
        # Room that stays empty, however the rest is chosen, costs its price too.
        empty = np.maximum(room - size - more[place + 1], 0.0)
        can = (size + least[place + 1] <= room) & (beyond + price * empty < gap)
        size = size[can]
        beyond = beyond[can]
        came = came[can]
        way = way[can]
        kept = _front(size, beyond - price * size)
        if len(kept) > most:
            kept = _thinned(kept, size, most)
            whole = False
        size = size[kept]
        beyond = beyond[kept]
        trail.append((came[kept], way[kept]))
    if not len(size):
        return best, whole
    found = int(np.argmin(beyond - price * size))
    picks = [fixed.get(n, 0) for n in range(len(ways))]
    for n, (came, way) in zip(reversed(order), reversed(trail), strict=True):
        picks[n], found = int(way[found]), int(came[found])
    return (picks if _sum(ways, picks)[0] < cost else best), whole


def _front(size: Numbers, cost: Numbers) -> Indices:
    """Return the states that no other dominates, by size."""
    order: Indices = np.lexsort((cost, size))
    if not len(order):
        return order
    falling = cost[order]
    kept: Indices = order[np.concatenate([[True], falling[1:] < np.minimum.accumulate(falling)[:-1]])]
    return kept


def _thinned(kept: Indices, size: Numbers, most: int) -> Indices:
    """Return the cheapest state of each of ``most`` equal spans of size."""
    sizes = size[kept]
    spans = ((sizes - sizes[0]) * (most / (sizes[-1] - sizes[0]))).astype(np.int64)
    found: Indices = kept[np.append(spans[1:] != spans[:-1], True)]
    return found
