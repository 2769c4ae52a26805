"""Cutting work into tasks: runs of consecutive steps or tensors, and rows of large ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from ingot.cluster.messages import Task
from ingot.core.registry import Registry

Body = TypeVar("Body")
Result = TypeVar("Result")


@dataclass
class TaskType(Generic[Body, Result]):
    """A function that workers run, and the types of its argument and its result, which messages are checked against."""

    body: type[Body]
    result: type[Result]
    run: Callable[[Body], Result]

    def close(self) -> None:
        """Close the files that a task has left open for the next one."""


TASK_TYPES: Registry[TaskType[Any, Any]] = Registry(
    "task",
    (
        ("convert", "ingot.conversion.planfile:TASKS"),
        ("delta", "ingot.delta.planfile:TASKS"),
        ("verify", "ingot.inspect.questions:VERIFY"),
        ("compare", "ingot.inspect.questions:COMPARE"),
        ("delta-cost", "ingot.delta.questions:DELTA_COST"),
        ("pair-cast", "ingot.delta.questions:PAIR_CAST"),
        ("pair-equal", "ingot.delta.questions:PAIR_EQUAL"),
        ("pair-digest", "ingot.delta.questions:PAIR_DIGEST"),
        ("pair-changed", "ingot.delta.questions:PAIR_CHANGED"),
        ("pair-measure", "ingot.delta.questions:PAIR_MEASURE"),
        ("pair-draft", "ingot.delta.questions:PAIR_DRAFT"),
    ),
)


LEAST, MOST = 32 << 20, 1 << 30
"""Source bytes of a task."""


def runs_of(
    sizes: Sequence[int],
    slots: int,
    done: Collection[int] = (),
    pieces: Callable[[int], tuple[int, int] | None] | None = None,
) -> list[Task]:
    """Cut what reads so many bytes each into tasks, of consecutive numbers and an eighth of a worker's share of all.

    Parameters
    ----------
    sizes : sequence of int
        Bytes that each step or tensor reads.
    slots : int
        Workers.
    done : collection of int
        Numbers that are in no task.
    pieces : callable, optional
        Asked of what is more than a worker's share: its rows, and at whose multiples it may be cut; None where it may
        not.
    """
    total = sum(sizes)
    size = min(max(total // (8 * max(slots, 1)), LEAST), MOST)
    share = max(total // max(slots, 1), LEAST)
    tasks: list[Task] = []
    start = nbytes = 0
    for number, count in enumerate(sizes):
        cut = pieces(number) if pieces is not None and number not in done and count > share else None
        alone = number in done or cut is not None
        if start < number and (alone or nbytes + count > size):
            tasks.append(Task(start, number, nbytes))
            start = number
            nbytes = 0
        if cut is not None:
            tasks += _pieces_of(number, count, cut, size)
        nbytes += count
        if alone:
            start = number + 1
            nbytes = 0
    if start < len(sizes):
        tasks.append(Task(start, len(sizes), nbytes))
    return tasks


def _pieces_of(number: int, nbytes: int, pieces: tuple[int, int], size: int) -> list[Task]:
    """Return the tasks that do one step, of ``pieces`` rows at whose multiples of the second they may be cut."""
    rows, unit = pieces
    each = max(rows * size // nbytes // unit, 1) * unit
    cuts = [*range(0, rows, each), rows]
    return [
        Task(number, number + 1, nbytes * stop // rows - nbytes * start // rows, (start, stop))
        for start, stop in pairwise(cuts)
    ]
