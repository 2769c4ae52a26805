"""Handing out tasks to workers, once more to another where one is lost, and waiting for what they make of each step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from operator import itemgetter

from ingot.core.parallel import go_on
from ingot.core.progress import Progress
from ingot.engine.cluster.notes import Made, Note, Task
from ingot.engine.cluster.pool import Pool
from ingot.errors import ResourceError

TRIES = 4
"""How often a task is begun before it is given up."""

_WAIT = 0.25
_AHEAD = 2  # tasks that wait for each worker, so that none waits for the driver


@dataclass(slots=True)
class Share:
    """What one worker did: tasks, source bytes and seconds."""

    tasks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Crew:
    """The tasks of a plan on their way; a context manager, at whose end no worker runs any more.

    Parameters
    ----------
    pool : Pool
        Closed at the end.
    tasks : sequence of Task
        All that are to be done; each step is in one, or its rows are in several.
    submit : callable
        Hands a task to the pool.
    known : iterable of Note
        What an earlier run left, of other steps than those of ``tasks``.
    progress : Progress
        Told the bytes of every task that is done, and how fast each worker is.

    Attributes
    ----------
    shares : dict
        What each worker did.
    whole : dict
        Files of the result that workers have made, and under which names they have left them.

    Raises
    ------
    ResourceError
        By ``made``: ``cluster.lost`` where a task's workers were lost ``TRIES`` times. Other errors of a task end all.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: Sequence[Task],
        submit: Callable[[Task], Future[Note]],
        known: Iterable[Note],
        progress: Progress,
    ) -> None:
        self._pool, self._submit, self._progress = pool, submit, progress
        self._tasks = deque(tasks)
        self._tries: dict[str, int] = {}
        self._changed = threading.Condition()
        self._made: dict[int, list[tuple[int, Made]]] = {}  # with the first row
        self._missing: dict[int, int] = {}
        self.whole: dict[str, str] = {}
        for task in tasks:
            for number in range(task.start, task.stop):
                self._missing[number] = self._missing.get(number, 0) + 1
        self.shares: dict[str, Share] = {}
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._begun = False
        for note in known:
            self._take(note)
        self._thread = threading.Thread(target=self._run, name="ingot-crew", daemon=True)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.close()  # wakes a thread that waits for a result
        with self._changed:
            begun = self._begun
        if begun:
            self._thread.join()

    def made(self, number: int) -> list[Made]:
        """Wait for all that is made of a step, in the order of its rows; raises what went wrong with any task.

        The first call begins: not before the files are ready that workers write into.
        """
        with self._changed:
            if not self._begun:
                self._begun = True
                self._thread.start()
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._missing.get(number, 0) == 0 and number in self._made:
                    return [made for _, made in sorted(self._made.pop(number), key=itemgetter(0))]
                self._changed.wait(_WAIT)
            go_on()

    def rates(self) -> Mapping[str, float]:
        """Return the bytes per second of each worker while it had a task."""
        return {name: share.nbytes / max(share.seconds, 1e-9) for name, share in self.shares.items()}

    def _run(self) -> None:
        running: dict[Future[Note], Task] = {}
        try:
            while (self._tasks or running) and not self._stop.is_set():
                while self._tasks and len(running) < _AHEAD * max(self._pool.slots, 1):
                    task = self._tasks.popleft()
                    running[self._submit(task)] = task
                    if self._stop.is_set():
                        return
                for future in wait(running, _WAIT, FIRST_COMPLETED).done:
                    self._settle(future, running.pop(future))
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            for future in running:
                future.cancel()

    def _settle(self, future: Future[Note], task: Task) -> None:
        """Take a task's result, or have it done again; raises what no other try will mend."""
        try:
            note = future.result()
        except Exception as error:
            if self._stop.is_set():
                return
            if not isinstance(error, (*self._pool.lost, CancelledError, ResourceError)):
                raise
            self._tries[task.name] = self._tries.get(task.name, 0) + 1
            if self._tries[task.name] >= TRIES:
                raise error if isinstance(error, ResourceError) else _lost(task, error) from error
            self._tasks.appendleft(task)
            return
        with self._changed:
            share = self.shares.setdefault(note.worker, Share())
            share.tasks, share.nbytes = share.tasks + 1, share.nbytes + task.nbytes
            share.seconds += note.seconds
            self._take(note)
            self._changed.notify_all()
        self._progress.advance(task.nbytes, "", self.rates())

    def _take(self, note: Note) -> None:
        self.whole.update(zip(note.task.files, note.files, strict=False))
        for item in note.made:
            if item.number in self._missing:
                self._missing[item.number] -= 1
            self._made.setdefault(item.number, []).append(((note.task.rows or (0,))[0], item))


def _lost(task: Task, error: BaseException) -> ResourceError:
    return ResourceError(
        f"expected a worker to live through steps {task.start} to {task.stop - 1}, lost {TRIES} one after the other "
        f"({type(error).__name__}: {str(error)[:200]}): give each more memory, or less work by a lower max_ram",
        rule="cluster.lost",
    )
