"""Schedule tasks on workers, with retries on other workers."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ingot.cluster.messages import Task, WorkerLostError
from ingot.cluster.pool import Pool
from ingot.core.runtime.progress import Progress
from ingot.errors import ResourceError

R = TypeVar("R")

TRIES = 4
"""The number of attempts of a task before the run ends with its error."""

_WAIT = 0.25
_AHEAD = 2  # tasks submitted per worker, so that no worker waits for the driver


@dataclass(slots=True)
class _WorkerTotals:
    nbytes: int = 0
    seconds: float = 0.0


class WorkerStats:
    """The bytes that each worker processed, and the seconds that its tasks took.

    ``progress`` receives the bytes of every finished task, and the rate of each worker in bytes per second.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._totals: dict[str, _WorkerTotals] = {}

    def add(self, worker: str, nbytes: int, seconds: float) -> None:
        """Add a finished task of ``worker``: the bytes that it read, and its seconds."""
        totals = self._totals.setdefault(worker, _WorkerTotals())
        totals.nbytes += nbytes
        totals.seconds += seconds
        rates = {name: item.nbytes / max(item.seconds, 1e-9) for name, item in self._totals.items()}
        self._progress.advance(nbytes, "", rates)


def run_tasks(
    pool: Pool,
    tasks: Sequence[Task],
    submit: Callable[[Task], Future[R]],
    commit: Callable[[Task, R], Iterable[Task] | None],
    stop: threading.Event | None = None,
) -> None:
    """Run all tasks, started in their order, and wait for them.

    Parameters
    ----------
    pool : Pool
        The caller closes it.
    tasks : sequence of Task
        In the order in which a single process would run them.
    submit : callable
        Submits a task to the pool.
    commit : callable
        Receives each task with its result, in the order in which tasks finish. It may return tasks to run again,
        because their results do not fit together.
    stop : Event, optional
        If it is set, the function returns without waiting for the tasks.

    Raises
    ------
    ResourceError
        ``cluster.lost``: the workers of a task were lost ``TRIES`` times.
    Exception
        The error of the first task, in the order of ``tasks``, that raised one. All tasks before it are finished, as if
        a single process had run the tasks.
    """
    stop = stop or threading.Event()
    state = _Schedule[R](deque(tasks))
    try:
        while (state.waiting or state.running) and not stop.is_set():
            while state.waiting and len(state.running) < _AHEAD * max(pool.slots, 1):
                task = state.waiting.popleft()
                state.running[submit(task)] = task
                if stop.is_set():
                    return
            for future in wait(state.running, _WAIT, FIRST_COMPLETED).done:
                task = state.running.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    if stop.is_set():
                        return
                    state.retry_or_fail(task, error)
                    continue
                for again in commit(task, result) or ():
                    state.retry_or_fail(again, WorkerLostError("results of several workers do not fit together"))
            state.drop_later()
        if state.failed is not None:
            raise state.failed[1]
    finally:
        for future in state.running:
            future.cancel()


@dataclass(slots=True)
class _Schedule(Generic[R]):
    """The state of ``run_tasks``: waiting and running tasks, attempts by task, and the first task that failed."""

    waiting: deque[Task]
    running: dict[Future[R], Task] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    failed: tuple[Task, BaseException] | None = None

    def retry_or_fail(self, task: Task, error: Exception) -> None:
        """Put a task at the front of the queue again, or record its error if no retry remains."""
        self.tries[task.name] += 1
        final = _final_error(task, error, self.tries[task.name])
        if final is None:
            self.waiting.appendleft(task)
        elif self.failed is None or _position(task) < _position(self.failed[0]):
            self.failed = task, final

    def drop_later(self) -> None:
        """If a task has failed, cancel all later tasks, in the order of the steps."""
        if self.failed is None:
            return
        position = _position(self.failed[0])
        for future, task in self.running.items():
            if _position(task) > position:
                future.cancel()
        self.waiting = deque(task for task in self.waiting if _position(task) < position)
        self.running = {future: task for future, task in self.running.items() if _position(task) < position}


def _position(task: Task) -> tuple[int, int]:
    return task.start, (task.rows or (0, 0))[0]


def _final_error(task: Task, error: Exception, tries: int) -> BaseException | None:
    """Return the error to raise for a task that failed ``tries`` times, or None to try again."""
    if not isinstance(error, (WorkerLostError, CancelledError, ResourceError)):
        return error
    if tries < TRIES:
        return None
    if isinstance(error, ResourceError):
        return error
    final = ResourceError(
        f"{TRIES} workers were lost one after the other in steps or tensors {task.start} to {task.stop - 1}, the last: "
        f"{str(error)[:300]}. If memory ran out, give each worker more, or a lower max_ram",
        rule="cluster.lost",
    )
    final.__cause__ = error
    return final
