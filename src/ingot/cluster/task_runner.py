"""Run the tasks of a plan on workers, and pass the results of each step to the thread that writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from ingot.cluster.messages import StepResult, Task, TaskResult
from ingot.cluster.pool import Pool
from ingot.cluster.scheduler import WorkerStats, run_tasks
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress

_WAIT = 0.25


class TaskRunner:
    """The running tasks of a plan; a context manager that ends all workers.

    Parameters
    ----------
    pool : Pool
        The runner closes it.
    tasks : sequence of Task
        Each step is in one task, or ranges of its rows are in several tasks.
    submit : callable
        Submits a task to the pool.
    earlier : iterable of TaskResult
        Results of an earlier run for steps that are not in ``tasks``.
    progress : Progress
        Gets the bytes of every finished task, and the rate of each worker.
    fits : callable
        Receives the index of a step and its results; returns whether they have the planned number of bytes.

    Attributes
    ----------
    files : dict
        Files of the result that workers have written in full, and their names in the shared folder.

    Raises
    ------
    ResourceError
        ``cluster.lost``, and the other errors of ``run_tasks``; the method ``results`` raises them.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: Sequence[Task],
        submit: Callable[[Task], Future[TaskResult]],
        earlier: Iterable[TaskResult],
        progress: Progress,
        fits: Callable[[int, Sequence[StepResult]], bool],
    ) -> None:
        self._pool = pool
        self._submit = submit
        self._tasks = tasks
        self._fits = fits
        self._stats = WorkerStats(progress)
        self._changed = threading.Condition()
        self._results: dict[int, list[tuple[Task, StepResult]]] = {}
        self._missing: dict[int, int] = {}  # number of tasks without a result, by step
        self.files: dict[str, str] = {}
        for task in tasks:
            for index in range(task.start, task.stop):
                self._missing[index] = self._missing.get(index, 0) + 1
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._started = False
        for result in earlier:
            self._add(result.task, result)
        self._thread = threading.Thread(target=self._run, name="ingot-tasks", daemon=True)

    def __enter__(self) -> TaskRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.close()  # wakes a thread that waits for a result
        with self._changed:
            started = self._started
        if started:
            self._thread.join()

    def results(self, index: int) -> list[StepResult]:
        """Wait for all results of a step, and return them in the order of its rows.

        Raises the error that ends the run, even if another step caused it. The first call starts the tasks, because the
        files into which workers write exist only then.
        """
        with self._changed:
            if not self._started:
                self._started = True
                self._thread.start()
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._missing.get(index, 0) == 0 and index in self._results:
                    return _in_order(self._results.pop(index))
                self._changed.wait(_WAIT)
            check_cancelled()

    def _run(self) -> None:
        try:
            run_tasks(self._pool, self._tasks, self._submit, self._commit, self._stop)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _commit(self, task: Task, result: TaskResult) -> list[Task]:
        with self._changed:
            again = self._add(task, result)
            self._changed.notify_all()
        self._stats.add(result.worker, task.nbytes, result.seconds)
        return again

    def _add(self, task: Task, result: TaskResult) -> list[Task]:
        """Store a task's results; return the tasks to run again.

        If the results of a step do not fit (``fits``), they are dropped, and all tasks of the step run again.
        """
        self.files.update(zip(task.files, result.files, strict=bool(task.files)))
        again: list[Task] = []
        for item in result.steps:
            index = item.number
            if index in self._missing:
                self._missing[index] -= 1
            results = self._results.setdefault(index, [])
            results.append((task, item))
            if self._missing.get(index, 0) == 0 and not self._fits(index, _in_order(results)):
                again += [task for task, _ in self._results.pop(index)]
                self._missing[index] = len(again)
        return again


def _in_order(results: Sequence[tuple[Task, StepResult]]) -> list[StepResult]:
    ordered = sorted(results, key=lambda pair: (pair[0].rows or (0, 0))[0])
    return [item for _, item in ordered]
