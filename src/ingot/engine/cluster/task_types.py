"""The tasks that a worker accepts: a fixed table of names, so that no message chooses the code that is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
        ("convert", "ingot.ops.cluster.distribute:CONVERT"),
        ("delta", "ingot.ops.cluster.distribute:DELTA"),
        ("verify", "ingot.ops.check.questions:VERIFY"),
        ("compare", "ingot.ops.check.questions:COMPARE"),
        ("delta-cost", "ingot.ops.delta.questions:DELTA_COST"),
        ("pair-cast", "ingot.ops.delta.questions:PAIR_CAST"),
        ("pair-equal", "ingot.ops.delta.questions:PAIR_EQUAL"),
        ("pair-digest", "ingot.ops.delta.questions:PAIR_DIGEST"),
        ("pair-changed", "ingot.ops.delta.questions:PAIR_CHANGED"),
        ("pair-measure", "ingot.ops.delta.questions:PAIR_MEASURE"),
        ("pair-draft", "ingot.ops.delta.questions:PAIR_DRAFT"),
    ),
)
