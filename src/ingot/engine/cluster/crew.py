"""The tasks of a plan on their way to workers, and waiting for what they make of each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from operator import itemgetter

from ingot.core.parallel import go_on
from ingot.core.progress import Progress
from ingot.engine.cluster.handing import Tally, hand_out
from ingot.engine.cluster.notes import Made, Note, Task
from ingot.engine.cluster.pool import Pool

_WAIT = 0.25


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
    whole : dict
        Files of the result that workers have made, and under which names they have left them.

    Raises
    ------
    ResourceError
        By ``made``: ``cluster.lost``, and other errors of tasks, as ``hand_out``.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: Sequence[Task],
        submit: Callable[[Task], Future[Note]],
        known: Iterable[Note],
        progress: Progress,
    ) -> None:
        self._pool, self._submit, self._tasks = pool, submit, tasks
        self._tally = Tally(progress)
        self._changed = threading.Condition()
        self._made: dict[int, list[tuple[int, Made]]] = {}  # with the first row
        self._missing: dict[int, int] = {}
        self.whole: dict[str, str] = {}
        for task in tasks:
            for number in range(task.start, task.stop):
                self._missing[number] = self._missing.get(number, 0) + 1
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

    def _run(self) -> None:
        try:
            hand_out(self._pool, self._tasks, self._submit, self._settle, self._stop)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _settle(self, task: Task, note: Note) -> None:
        with self._changed:
            self._take(note)
            self._changed.notify_all()
        self._tally.add(note.worker, task.nbytes, note.seconds)

    def _take(self, note: Note) -> None:
        self.whole.update(zip(note.task.files, note.files, strict=False))
        for item in note.made:
            if item.number in self._missing:
                self._missing[item.number] -= 1
            self._made.setdefault(item.number, []).append(((note.task.rows or (0,))[0], item))
