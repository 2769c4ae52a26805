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
