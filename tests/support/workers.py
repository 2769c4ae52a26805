"""A pool of workers for tests, without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ingot.cluster import messages
from ingot.cluster.messages import Answer, WorkerLostError
from ingot.cluster.task_types import TASK_TYPES
from ingot.cluster.worker import answer
from ingot.errors import INGOT_VERSION


class Inline:
    """A pool of one worker, this process, which gets the messages that any worker gets.

    The tasks that ``fails`` has an error for, by their count, end with it. ``change`` gets each result as parsed JSON,
    and returns what the worker returns instead.
    """

    is_local = True

    def __init__(
        self,
        fails: Callable[[int], BaseException | None] = lambda count: None,
        slots: int = 1,
        change: Callable[[int, Any], Any] = lambda count, result: result,
    ) -> None:
        self.tasks: list[Any] = []
        self.losses: list[WorkerLostError] = []
        self._types: set[str] = set()
        self.slots, self._fails, self._change = slots, fails, change

    def submit(self, task_type: str, body: Any, check: Callable[[Any], None] | None = None) -> Future[Any]:
        """As ``Pool.submit``."""
        future: Future[Any] = Future()
        self.tasks.append(body.task)
        self._types.add(task_type)
        count = len(self.tasks)
        error = self._fails(count)
        if error is None:
            try:
                future.set_result(self._result(task_type, body, check, count))
            except Exception as raised:
                error = raised
        if error is not None:
            if isinstance(error, WorkerLostError):
                self.losses.append(error)
            future.set_exception(error)
        return future

    def _result(self, task_type: str, body: Any, check: Callable[[Any], None] | None, count: int) -> Any:
        request = {"id": count, "ingot": INGOT_VERSION, "type": task_type, "body": body}
        answered = messages.decode(answer(messages.encode(request)), Answer)
        if answered.error is not None:
            raise messages.decode_error(answered.error)
        try:
            result = messages.convert(self._change(count, answered.result), TASK_TYPES[task_type].result)
        except messages.InvalidMessageError as error:
            raise WorkerLostError(str(error)) from error
        if check is not None:
            check(result)
        return result

    def close(self) -> None:
        """As ``Pool.close``."""
        for name in self._types:
            TASK_TYPES[name].close()
