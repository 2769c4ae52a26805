"""Split work into tasks: runs of consecutive steps or tensors, and ranges of rows of a large step or tensor."""

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
    """The type of a task: the function that workers run, and the types that validate its argument and result."""

    body: type[Body]
    result: type[Result]
    run: Callable[[Body], Result]

    def close(self) -> None:
        """Close the files that stay open between tasks."""


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


MIN_TASK_BYTES = 32 << 20
MAX_TASK_BYTES = 1 << 30
"""The smallest and the largest size of a task, in bytes that it reads. A single step may be larger."""


def split_tasks(
    sizes: Sequence[int],
    slots: int,
    excluded: Collection[int] = (),
    row_ranges: Callable[[int], tuple[int, int] | None] | None = None,
) -> list[Task]:
    """Split steps or tensors into tasks of consecutive indices, each about an eighth of a worker's share.

    Parameters
    ----------
    sizes : sequence of int
        Bytes that each step or tensor reads.
    slots : int
        Number of workers.
    excluded : collection of int
        Indices that are in no task.
    row_ranges : callable, optional
        Receives the index of a step that is larger than a worker's share. Returns its number of rows and the unit at
        whose multiples it may be split, or None if it may not be split.
    """
    total = sum(sizes)
    size = min(max(total // (8 * max(slots, 1)), MIN_TASK_BYTES), MAX_TASK_BYTES)
    share = max(total // max(slots, 1), MIN_TASK_BYTES)
    tasks: list[Task] = []
    start = nbytes = 0
    for index, count in enumerate(sizes):
        is_large = count > share and index not in excluded
        rows = row_ranges(index) if row_ranges is not None and is_large else None
        is_separate = index in excluded or rows is not None
        if start < index and (is_separate or nbytes + count > size):
            tasks.append(Task(start, index, nbytes))
            start = index
            nbytes = 0
        if rows is not None:
            tasks += _split_rows(index, count, rows, size)
        nbytes += count
        if is_separate:
            start = index + 1
            nbytes = 0
    if start < len(sizes):
        tasks.append(Task(start, len(sizes), nbytes))
    return tasks


def _split_rows(index: int, nbytes: int, row_range: tuple[int, int], size: int) -> list[Task]:
    """Return tasks for the rows of one large step, each of about ``size`` bytes.

    ``nbytes`` are the bytes of the step; ``row_range`` is its number of rows and the unit of splits.
    """
    rows, unit = row_range
    task_rows = max(rows * size // nbytes // unit, 1) * unit
    cuts = [*range(0, rows, task_rows), rows]
    return [
        Task(index, index + 1, nbytes * stop // rows - nbytes * start // rows, (start, stop))
        for start, stop in pairwise(cuts)
    ]
