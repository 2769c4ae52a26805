"""What a budget had to choose from, for its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.core.allocation import Allocation, frontier
from ingot.ops.convert.budget_groups import Group, Survey
from ingot.ops.convert.budget_report import GroupReport, PointReport, TypeReport

_POINTS = 12


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes that all weight files may take, None where something else is the limit, and the number of weights."""

    size: int | None
    elements: int

    def bits(self, size: float) -> float:
        """Return bytes as bits per weight."""
        return 8 * size / self.elements


def types_of(
    surveys: Sequence[Survey],
    groups: Sequence[Group],
    costs: Sequence[Sequence[float]],
    allocation: Allocation,
    target: Target,
) -> list[TypeReport]:
    """Return what each type alone would give, and how many tensors have it."""
    chosen = [group.ways[way].label for group, way in zip(groups, allocation.picks, strict=True)]
    found = []
    for each in surveys:
        loss = 0.0
        for group, known in zip(groups, costs, strict=True):
            choices = tuple(each.choices[name] for name in group.names)
            loss += next((cost for way, cost in zip(group.ways, known, strict=True) if way.choices == choices), 0.0)
        size = sum(each.nbytes.values()) + each.beside
        count = sum(len(group.names) for group, label in zip(groups, chosen, strict=True) if label == each.label)
        found.append(TypeReport(each.label, size, target.bits(size), loss, count))
    return found


def points_of(
    groups: Sequence[Group], costs: Sequence[Sequence[float]], allocation: Allocation, size: int, target: Target
) -> list[PointReport]:
    """Return some of the sizes at which nothing better is known, and what was chosen among them."""
    sizes, lost = frontier(costs, [[way.nbytes for way in group.ways] for group in groups])
    beside = size - int(allocation.size)
    some = sorted({round(number * (len(sizes) - 1) / (_POINTS - 1)) for number in range(_POINTS)})
    points = [
        PointReport(int(sizes[n]) + beside, target.bits(sizes[n] + beside), max(float(lost[n]), 0.0)) for n in some
    ]
    here = PointReport(size, target.bits(size), allocation.cost, "<- chosen")
    return sorted([*(point for point in points if point.size != size), here], key=lambda point: point.size)


def group_of(group: Group, costs: Sequence[float], pick: int) -> GroupReport:
    """Return what a group has, and what it could have."""
    way = group.ways[pick]
    candidates = {each.label: (each.nbytes, cost) for each, cost in zip(group.ways, costs, strict=True)}
    return GroupReport(group.names, way.label, way.nbytes, costs[pick], candidates)
