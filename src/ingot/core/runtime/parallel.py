"""Bounded work on threads. Native kernels, reads, writes and hashing release the GIL, so threads are enough."""

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
def share_team() -> bool:
    """Do that work by the threads of the OpenMP library that this process has loaded for all, from now on.

    OpenMP's threads look for work all the time for some milliseconds, and so leave no processor to threads of ours that
    come next. Returns whether there is such a library; without it the kernels keep threads of their own, as they do in
    a process that was forked, which has none of its parent's. On Linux only.
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
"""Bytes of work that are worth a thread's waking."""
# A light item weighs less than the first; at most so many go together.
_EACH = 1 << 15
_BATCH = 64


class Stopped(BaseException):
    """Raised by ``go_on`` in a thread whose work nobody waits for any more; ends with that work."""


class Halt:
    """Whether the threads that adopted it are to stop, because it was set or that of the thread that made it."""

    def __init__(self) -> None:
        self._set = False
        self._parent: Halt | None = getattr(_THREAD, "halt", None)

    def set(self) -> None:
        self._set = True

    @property
    def is_set(self) -> bool:
        return self._set or (self._parent is not None and self._parent.is_set)


_THREAD = threading.local()


def adopt(halt: Halt) -> None:
    """Make ``go_on`` in this thread, and in the threads of pools that it makes, heed ``halt``."""
    _THREAD.halt = halt


def go_on() -> None:
    """Raise ``Stopped`` if this thread's pool was told to stop: called between the pieces of every long work.

    So Ctrl-C ends an operation inside a tensor. In a thread of no pool, the main one above all, it does nothing.
    """
    halt: Halt | None = getattr(_THREAD, "halt", None)
    if halt is not None and halt.is_set:
        raise Stopped


class Workers(ThreadPoolExecutor):
    """A pool of threads whose running work is stopped, not only waited for, when its futures are cancelled.

    As a context manager it waits for everything, and on an exception stops.
    """

    def __init__(self, workers: int, name: str = "ingot") -> None:
        self._halt = Halt()
        super().__init__(workers, thread_name_prefix=name, initializer=adopt, initargs=(self._halt,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the threads; with ``cancel_futures`` drop what has not begun and stop what has at ``go_on``."""
        if cancel_futures:
            self._halt.set()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)


def default_workers() -> int:
    """Return how many threads to use: ``OMP_NUM_THREADS`` if it is a positive number, else the processors that this
    process may run on (affinity), cut to the processor quota of its control group, rounded up; at least 1.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, count if quota is None else min(count, quota))


def ordered(
    fn: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None, window: int | None = None
) -> Iterator[Result]:
    """Yield ``fn(item)`` for every item, in the items' order.

    Parameters
    ----------
    items : iterable
        Taken one by one by the thread that iterates over the results.
    workers : int, optional
        Threads. 0 runs ``fn`` in the calling thread when a result is asked for; 1 is one thread beside the caller, so
        that both overlap. ``default_workers()`` if not given.
    window : int, optional
        At most so many items are in flight: waiting, running, done, or in the hands of the caller. ``2 * workers`` by
        default, and never less than 1.

    Notes
    -----
    When ``fn`` or ``items`` raises, when the caller stops, or on Ctrl-C, items not begun are dropped, running ones stop
    at their next ``go_on``, and no thread is left; then the exception goes on.
    """
    workers = default_workers() if workers is None else workers
    if workers < 0 or (window is not None and window < 1):
        raise UsageError(
            f"expected workers >= 0 and window >= 1, found {workers} and {window}", rule="parallel.workers"
        )
    if workers == 0:
        for item in items:
            go_on()
            yield fn(item)
        return
    feed = iter(items)
    pending: deque[Future[Result]] = deque()
    pool = Workers(workers)

    def run(item: Item) -> Result:
        go_on()
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
    """As ``ordered``; light items are done many at a time, and by the calling thread when their turn comes.

    Threads would take turns at Python's lock with them, and waking one takes longer than they do. ``weigh`` says how
    many bytes an item reads; one that waits for another machine weighs ``HEAVY``. An item that raises takes those with
    it that were handed on beside it.
    """
    workers = default_workers() if workers is None else workers

    def run(batch: list[Item]) -> list[Result]:
        results: list[Result] = []
        for item in batch:
            go_on()
            results.append(fn(item))
        return results

    with Workers(max(workers, 1)) as pool:  # which starts threads as work comes
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
    """Cut items into runs of light ones, at most ``_BATCH`` together, and of others; tell whether they are light.

    A run weighs ``HEAVY``, or little more.
    """
    batch: list[Item] = []
    weight = 0
    light = True
    for item in items:
        own = weigh(item)
        if batch and (own < _EACH) != light:
            yield batch, light
            batch = []
            weight = 0
        light = own < _EACH
        batch.append(item)
        weight += own
        if weight >= HEAVY or len(batch) >= _BATCH:
            yield batch, light
            batch = []
            weight = 0
    if batch:
        yield batch, light


def for_ranges(count: int, step: int, fn: Callable[[int, int], object], workers: int | None = None) -> None:
    """Call ``fn(start, stop)`` for consecutive ranges of at most ``step`` that cover ``range(count)``, on threads.

    A single range, or ``workers`` 0 or 1, runs in the calling thread. The first exception in order is raised, after the
    calls that were running have ended.
    """
    if step < 1:
        raise UsageError(f"expected step >= 1, found {step}", rule="parallel.step")
    ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
    if workers is None:  # asking reads files
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
    """Read ``cpu.max`` (v2: "quota period" or "max period") or ``cpu.cfs_quota_us`` (v1: -1 is none)."""
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
