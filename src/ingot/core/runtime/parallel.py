"""Parallel work on threads, with a bounded number of items in memory, and cancellation.

Native kernels, reads, writes and hashing release the GIL, so that threads suffice.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ingot.core.runtime import native
from ingot.core.runtime.memory import limit_files
from ingot.errors import UsageError


@cache
def share_openmp() -> bool:
    """Make the native kernels use the threads of the OpenMP library that this process has loaded, if there is one.

    OpenMP's threads wait actively for some milliseconds after each task, and would compete with separate threads of the
    kernels. Returns whether the library is loaded; without it, and in a forked process, the kernels use their own
    threads. Only on Linux.
    """
    if not sys.platform.startswith("linux"):
        return False
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    address = ctypes.cast(entry, ctypes.c_void_p).value if entry else None
    native.kernels.share_team(address or 0)
    return address is not None


Item = TypeVar("Item")
Result = TypeVar("Result")


HEAVY = 1 << 18
"""Minimum bytes of a task for which waking a thread pays off."""
_LIGHT = 1 << 15  # items of fewer bytes are processed in batches
_BATCH = 64  # items


class Cancelled(BaseException):
    """Raised by ``check_cancelled`` in a thread whose work was cancelled; it never reaches the caller."""


class CancelToken:
    """A token that cancels the work of the threads that adopted it.

    If the thread that creates a token has a token itself, setting that token also sets the new one.
    """

    def __init__(self) -> None:
        self._set = False
        self._parent: CancelToken | None = getattr(_THREAD, "token", None)

    def set(self) -> None:
        self._set = True

    @property
    def is_set(self) -> bool:
        return self._set or (self._parent is not None and self._parent.is_set)


_THREAD = threading.local()


def inherit_token(token: CancelToken) -> None:
    """Set the token that ``check_cancelled`` checks in this thread and in threads of pools that it creates."""
    _THREAD.token = token


def check_cancelled() -> None:
    """Raise ``Cancelled`` if the work of this thread was cancelled.

    All long tasks call this between chunks, so that Ctrl-C ends an operation within a tensor. In threads without a
    token, such as the main thread, it does nothing.
    """
    token: CancelToken | None = getattr(_THREAD, "token", None)
    if token is not None and token.is_set:
        raise Cancelled


class Workers(ThreadPoolExecutor):
    """A pool of threads that stops running tasks if its futures are cancelled.

    As a context manager it waits for all tasks; after an exception it cancels them.
    """

    def __init__(self, workers: int, name: str = "ingot") -> None:
        self._token = CancelToken()
        super().__init__(workers, thread_name_prefix=name, initializer=inherit_token, initargs=(self._token,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the threads; with ``cancel_futures`` drop waiting tasks and cancel running ones."""
        if cancel_futures:
            self._token.set()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)

    def __exit__(
        self, error_type: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(wait=True, cancel_futures=error_type is not None)


def default_workers() -> int:
    """Return the number of threads to use, at least 1.

    This is ``OMP_NUM_THREADS`` if it is a positive number. Otherwise it is the number of processors that this process
    may run on (affinity), limited by the processor quota of its control group, rounded up.
    """
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if variable.isdecimal() and int(variable) > 0:
        return int(variable)
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, count if quota is None else min(count, quota))


def ordered(
    fn: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None, window: int | None = None
) -> Iterator[Result]:
    """Yield ``fn(item)`` for all items, in the items' order.

    Parameters
    ----------
    fn : callable
        Called on the threads.
    items : iterable
        Consumed by the thread that iterates over the results.
    workers : int, optional
        The number of threads; ``default_workers()`` by default. 0 calls ``fn`` in the calling thread when the next
        result is requested. 1 is one additional thread, which overlaps with the caller.
    window : int, optional
        The limit of items in flight: waiting, running, done, or being used by the caller. ``2 * workers`` by default,
        at least 1.

    Notes
    -----
    If ``fn`` or ``items`` raises an error, if the caller stops iterating, or on Ctrl-C, waiting items are dropped and
    running ones stop at their next ``check_cancelled``. All threads have ended before the error is raised.
    """
    workers = default_workers() if workers is None else workers
    if workers < 0 or (window is not None and window < 1):
        raise UsageError(
            f"expected workers >= 0 and window >= 1, found {workers} and {window}", rule="parallel.workers"
        )
    if workers == 0:
        for item in items:
            check_cancelled()
            yield fn(item)
        return
    feed = iter(items)
    pending: deque[Future[Result]] = deque()
    pool = Workers(workers)

    def run(item: Item) -> Result:
        check_cancelled()
        return fn(item)

    try:
        pending.extend(pool.submit(run, item) for item in islice(feed, window or 2 * workers))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(run, item) for item in islice(feed, 1))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ordered_together(
    fn: Callable[[Item], Result],
    items: Iterable[Item],
    weigh: Callable[[Item], int],
    workers: int | None = None,
) -> Iterator[Result]:
    """Yield ``fn(item)`` for all items in order, as ``ordered`` does; process light items in batches.

    The calling thread processes batches of light items, because waking a thread and contending for the GIL takes
    longer. ``weigh`` returns the bytes that an item reads, and ``HEAVY`` for an item that waits for another machine. If
    an item raises an error, the results of its batch are lost.
    """
    workers = default_workers() if workers is None else workers

    def run(batch: list[Item]) -> list[Result]:
        results: list[Result] = []
        for item in batch:
            check_cancelled()
            results.append(fn(item))
        return results

    with Workers(max(workers, 1)) as pool:  # threads are started when tasks are submitted
        pending: deque[list[Item] | Future[list[Result]]] = deque()
        feed = _batches(items, weigh)
        while True:
            for batch, light in islice(feed, max(2 * workers, 1) - len(pending)):
                pending.append(batch if workers == 0 or light else pool.submit(run, batch))
            if not pending:
                return
            first = pending.popleft()
            yield from run(first) if isinstance(first, list) else first.result()


def _batches(items: Iterable[Item], weigh: Callable[[Item], int]) -> Iterator[tuple[list[Item], bool]]:
    """Yield batches of consecutive items, either all light or none, and whether they are light.

    A batch has at most ``_BATCH`` items, and ends as soon as they weigh ``HEAVY`` bytes together.
    """
    batch: list[Item] = []
    weight = 0
    light = True
    for item in items:
        nbytes = weigh(item)
        if batch and (nbytes < _LIGHT) != light:
            yield batch, light
            batch = []
            weight = 0
        light = nbytes < _LIGHT
        batch.append(item)
        weight += nbytes
        if weight >= HEAVY or len(batch) >= _BATCH:
            yield batch, light
            batch = []
            weight = 0
    if batch:
        yield batch, light


def for_ranges(count: int, step: int, fn: Callable[[int, int], object], workers: int | None = None) -> None:
    """Call ``fn(start, stop)`` on threads for consecutive ranges of at most ``step`` that cover ``range(count)``.

    A single range, or ``workers`` 0 or 1, runs in the calling thread. If calls fail, the first error in order is raised
    after the running calls have ended.
    """
    if step < 1:
        raise UsageError(f"expected step >= 1, found {step}", rule="parallel.step")
    ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
    if workers is None:  # default_workers reads files
        workers = default_workers() if len(ranges) > 1 else 1
    threads = min(workers, len(ranges))
    for _ in ordered(lambda pair: fn(*pair), ranges, 0 if threads <= 1 else threads):
        pass


def _cpu_quota() -> int | None:
    """Return the smallest processor quota of the control groups above this process, in whole processors."""
    quotas = [_quota_of(folder) for folder in limit_files("cpu")]
    limits = [quota for quota in quotas if quota]
    return min(limits) if limits else None


def _quota_of(folder: Path) -> int | None:
    """Return the quota of one control group in processors, rounded up; None for no quota.

    Reads ``cpu.max`` (v2: "quota period" or "max period") or ``cpu.cfs_quota_us`` (v1: -1 is no quota).
    """
    try:
        modern = folder / "cpu.max"
        if modern.exists():
            quota, period = modern.read_text(encoding="ascii").split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return None if quota in ("max", "-1") else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return None
