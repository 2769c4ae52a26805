"""Handing out tasks to workers, and once more to another where one is lost."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ingot.core.progress import Progress
from ingot.engine.cluster.notes import Task
from ingot.engine.cluster.pool import Pool
from ingot.errors import ResourceError

R = TypeVar("R")

TRIES = 4
"""How often a task is begun before it is given up."""

_WAIT = 0.25
_AHEAD = 2  # tasks that wait for each worker, so that none waits for the driver


@dataclass(slots=True)
class _Share:
    nbytes: int = 0
    seconds: float = 0.0


class Tally:
    """What each worker did, told to ``progress`` with every task that is done: its bytes, and how fast each worker is
    while it has a task."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shares: dict[str, _Share] = {}

    def add(self, worker: str, nbytes: int, seconds: float) -> None:
        """Count a task that is done."""
        share = self._shares.setdefault(worker, _Share())
        share.nbytes, share.seconds = share.nbytes + nbytes, share.seconds + seconds
        rates = {name: each.nbytes / max(each.seconds, 1e-9) for name, each in self._shares.items()}
        self._progress.advance(nbytes, "", rates)


def hand_out(
    pool: Pool,
    tasks: Sequence[Task],
    submit: Callable[[Task], Future[R]],
    settle: Callable[[Task, R], None],
    stop: threading.Event | None = None,
) -> None:
    """Have all tasks done, the first first, and wait for them.

    Parameters
    ----------
    pool : Pool
        Not closed here.
    tasks : sequence of Task
        In the order in which one process would do them.
    submit : callable
        Hands a task to the pool.
    settle : callable
        Takes what a task returned, whichever is done first.
    stop : Event, optional
        Ends the waiting.

    Raises
    ------
    ResourceError
        ``cluster.lost`` where a task's workers were lost ``TRIES`` times.
    Exception
        Any other error of a task, of the first in order that has one: those before it are done, as they are where one
        process does all.
    """
    stop = stop or threading.Event()
    state = _Handing[R](pool, deque(tasks))
    try:
        while (state.left or state.running) and not stop.is_set():
            while state.left and len(state.running) < _AHEAD * max(pool.slots, 1):
                task = state.left.popleft()
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
                    state.fails(task, error)
                    continue
                settle(task, result)
            state.leave_out_later()
        if state.failed is not None:
            raise state.failed[1]
    finally:
        for future in state.running:
            future.cancel()


@dataclass(slots=True)
class _Handing(Generic[R]):
    """Tasks on their way: those that nobody has yet, those that are run, and the first one in order that failed."""

    pool: Pool
    left: deque[Task]
    running: dict[Future[R], Task] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    failed: tuple[Task, BaseException] | None = None

    def fails(self, task: Task, error: Exception) -> None:
        """Take in an error of a task: it is tried again, first of all, or fails."""
        self.tries[task.name] += 1
        final = _final(self.pool, task, error, self.tries[task.name])
        if final is None:
            self.left.appendleft(task)
        elif self.failed is None or _place(task) < _place(self.failed[0]):
            self.failed = task, final

    def leave_out_later(self) -> None:
        """Where a task has failed, wait for none but those before it."""
        if self.failed is None:
            return
        place = _place(self.failed[0])
        for future, task in self.running.items():
            if _place(task) > place:
                future.cancel()
        self.left = deque(task for task in self.left if _place(task) < place)
        self.running = {future: task for future, task in self.running.items() if _place(task) < place}


def _place(task: Task) -> tuple[int, int]:
    return task.start, (task.rows or (0, 0))[0]


def _final(pool: Pool, task: Task, error: Exception, tries: int) -> BaseException | None:
    """Return what to raise for a task's error; None where another try may mend it."""
    if not isinstance(error, (*pool.lost, CancelledError, ResourceError)):
        return error
    if tries < TRIES:
        return None
    if isinstance(error, ResourceError):
        return error
    lost = ResourceError(
        f"expected a worker to live through {task.start} to {task.stop - 1} of the steps or tensors, lost {TRIES} one "
        f"after the other ({type(error).__name__}: {str(error)[:200]}): give each more memory, or less work by a lower "
        "max_ram",
        rule="cluster.lost",
    )
    lost.__cause__ = error
    return lost
