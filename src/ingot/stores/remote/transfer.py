"""Many ranges at once: a pool of threads for the process, each with one request of a bounded size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ingot.core.files.system import after_fork
from ingot.core.runtime.parallel import Halt, adopt, go_on
from ingot.errors import ResourceError

PARALLEL = 16
"""Requests in flight in a process."""

PIECE = 8 << 20
"""Bytes of one request at most: together with ``PARALLEL`` the bytes in flight."""

Task = tuple[int, memoryview]
"""A place in a file, and the bytes to fill from it."""


class _Pool:
    """The process's threads, made when they are needed first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self.used = self.forked = False

    def get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PARALLEL, "ingot-remote")
            return self._threads

    def after_fork(self) -> None:
        """obstore's threads are gone in the child: a request would wait forever."""
        self.forked = self.forked or self.used
        self._lock = threading.Lock()
        self._threads = None


_POOL = _Pool()
after_fork(_POOL.after_fork)


def is_usable() -> bool:
    """Whether requests can be made: not in a process that was forked from one that made any."""
    return not _POOL.forked


def require_usable(where: str) -> None:
    """Refuse a request in a forked process; ``ResourceError`` ``remote.forked``. Called before each request."""
    if not is_usable():
        raise ResourceError(
            "a process that was forked after files of other machines were read cannot read such: start processes by "
            "spawn (multiprocessing.set_start_method)",
            rule="remote.forked",
            where=where,
        )
    _POOL.used = True


def pieces(tasks: Sequence[Task]) -> list[Task]:
    """Cut tasks into ones of at most ``PIECE`` bytes."""
    return [(start + at, out[at : at + PIECE]) for start, out in tasks for at in range(0, out.nbytes, PIECE)]


def transfer(read: Callable[[int, memoryview], None], tasks: Sequence[Task], where: str) -> None:
    """Call ``read(start, out)`` for all pieces of the tasks, many at a time; raise the first error."""
    require_usable(where)  # here, too: no thread is made for it
    every = pieces(tasks)
    if len(every) <= 1:
        for start, out in every:
            read(start, out)
        return
    halt = Halt()  # if the caller is interrupted, what is on its way ends with its next bytes

    def run(start: int, out: memoryview) -> None:
        adopt(halt)
        read(start, out)

    futures = [_POOL.get().submit(run, start, out) for start, out in every]
    try:
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
            go_on()
    finally:
        halt.set()
        for future in futures:
            future.cancel()
        wait(futures)
