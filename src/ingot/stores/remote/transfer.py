"""Concurrent reading of ranges by a pool of threads, in requests of limited size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ingot.core.files.system import after_fork
from ingot.core.runtime.parallel import CancelToken, check_cancelled, inherit_token
from ingot.errors import ResourceError

PARALLEL = 16
"""The number of concurrent requests in a process."""

MAX_REQUEST = 8 << 20
"""The largest request, in bytes; with ``PARALLEL`` it bounds the bytes in flight."""

Task = tuple[int, memoryview]
"""An offset in a file, and the buffer to fill from it."""


class _Pool:
    """The process's pool of threads, created on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self.used = False
        self.forked = False

    def get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(PARALLEL, "ingot-remote")
            return self._threads

    def after_fork(self) -> None:
        """Mark the pool of a forked child as unusable if the parent made requests: obstore's threads are missing."""
        self.forked = self.forked or self.used
        self._lock = threading.Lock()
        self._threads = None


_POOL = _Pool()
after_fork(_POOL.after_fork)


def is_usable() -> bool:
    """Return whether this process can make requests; a process forked after a request cannot."""
    return not _POOL.forked


def require_usable(location: str) -> None:
    """Raise ``ResourceError`` ``remote.forked`` if this process cannot make requests; called before each request."""
    if not is_usable():
        raise ResourceError(
            "a process that was forked after remote files were read cannot read remote files: start processes by "
            "spawn (multiprocessing.set_start_method)",
            rule="remote.forked",
            where=location,
        )
    _POOL.used = True


def split_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Split tasks into tasks of at most ``MAX_REQUEST`` bytes."""
    return [
        (start + offset, out[offset : offset + MAX_REQUEST])
        for start, out in tasks
        for offset in range(0, out.nbytes, MAX_REQUEST)
    ]


def transfer(read: Callable[[int, memoryview], None], tasks: Sequence[Task], location: str) -> None:
    """Call ``read(start, out)`` for all tasks, split to ``MAX_REQUEST``, concurrently; raise the first error."""
    require_usable(location)  # before a thread is created
    requests = split_tasks(tasks)
    if len(requests) <= 1:
        for start, out in requests:
            read(start, out)
        return
    halt = CancelToken()  # if the caller is interrupted, running requests stop at their next bytes

    def run(start: int, out: memoryview) -> None:
        inherit_token(halt)
        read(start, out)

    futures = [_POOL.get().submit(run, start, out) for start, out in requests]
    try:
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
            check_cancelled()
    finally:
        halt.set()
        for future in futures:
            future.cancel()
        wait(futures)
