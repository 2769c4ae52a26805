"""Handing out tasks to workers, and once more to another where one is lost."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from typing import TypeVar

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
    left, tries, running = deque(tasks), Counter[str](), dict[Future[R], Task]()
    failed: tuple[Task, BaseException] | None = None
    try:
        while (left or running) and not stop.is_set():
            while left and len(running) < _AHEAD * max(pool.slots, 1):
                task = left.popleft()
                running[submit(task)] = task
                if stop.is_set():
                    return
            for future in wait(running, _WAIT, FIRST_COMPLETED).done:
                task = running.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    if stop.is_set():
                        return
                    tries[task.name] += 1
                    final = _final(pool, task, error, tries[task.name])
                    if final is None:
                        left.appendleft(task)
                    elif failed is None or _place(task) < _place(failed[0]):
                        failed = task, final
                    continue
                settle(task, result)
            if failed is not None:
                left, running = _before(failed[0], left, running)
        if failed is not None:
            raise failed[1]
    finally:
        for future in running:
            future.cancel()


def _before(
    failed: Task, left: deque[Task], running: dict[Future[R], Task]
) -> tuple[deque[Task], dict[Future[R], Task]]:
    """Return the tasks that come before one that failed; the others are not waited for."""
    for future, task in running.items():
        if _place(task) > _place(failed):
            future.cancel()
    earlier = deque(task for task in left if _place(task) < _place(failed))
    return earlier, {future: task for future, task in running.items() if _place(task) < _place(failed)}


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
