"""Workers for tests of what is done by many."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ingot.engine.cluster.pool import answer


class Inline:
    """A pool that calls functions here. The tasks that ``fails`` has an error for, by their count, end with it; those
    of an ``EOFError`` have lost their workers."""

    lost: tuple[type[BaseException], ...] = (EOFError,)

    def __init__(self, fails: Callable[[int], BaseException | None] = lambda count: None, slots: int = 1) -> None:
        self.tasks: list[Any] = []
        self.slots, self._fails = slots, fails

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """As ``Pool.submit``."""
        future: Future[Any] = Future()
        self.tasks.append(arguments[1])
        error = self._fails(len(self.tasks))
        if error is not None:
            future.set_exception(error)
            return future
        good, result = answer(function, arguments)
        if good:
            future.set_result(result)
        else:
            future.set_exception(result)
        return future

    def close(self) -> None:
        """As ``Pool.close``."""
