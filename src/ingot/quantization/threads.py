"""The threads of matrices that are rounded side by side, and steps of columns that overlap on threads.

Threads only divide work into parts that do not depend on each other, so results are the same for any number of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ingot.core.runtime.parallel import check_cancelled, default_workers, ordered

_LOOK = 0.2  # seconds after which a waiting step checks whether its work was cancelled
_COUNT = threading.Lock()

Block = TypeVar("Block")


class _Caller(threading.local):
    limit = 1


class _Rounding:
    matrices = 0


_CALLER = _Caller()


@contextmanager
def on_threads(limit: int | None) -> Iterator[None]:
    """Let the calling thread use up to ``limit`` threads for its matrix; all matrices share these threads.

    If ``limit`` is None, there is one thread per processor. Without this context, the calling thread rounds a matrix
    alone.
    """
    before = _CALLER.limit
    _CALLER.limit = default_workers() if limit is None else limit
    with _COUNT:
        _Rounding.matrices += 1
    try:
        yield
    finally:
        _CALLER.limit = before
        with _COUNT:
            _Rounding.matrices -= 1


def pool_threads() -> int:
    """Return the number of threads that a product may use.

    It is the full limit, because the pool of the kernels computes one product at a time.
    """
    return _CALLER.limit


def share() -> int:
    """Return the number of threads for the calling thread's matrix: the limit divided by the number of matrices,
    rounded up.
    """
    return -(-_CALLER.limit // max(_Rounding.matrices, 1))


def each_block(blocks: Sequence[Block], work: Callable[[Block], object]) -> None:
    """Call ``work`` for independent blocks on threads; raise the first error in their order."""
    threads = min(share(), len(blocks))
    for _ in ordered(work, blocks, threads if threads > 1 else 0):
        pass


def in_steps(steps: int, blocks: int, work: Callable[[int, int], object]) -> None:
    """Call ``work(step, block)`` for all steps in order, and in each for its blocks from the last to the first.

    Steps overlap on threads. A block begins when the block after it and the same block of the previous step are
    complete.
    """
    first = [blocks] * steps  # complete block of each step
    changed = [threading.Condition() for _ in range(steps)]

    def wait(step: int, block: int) -> None:
        with changed[step]:
            while first[step] > block:
                changed[step].wait(_LOOK)
                check_cancelled()

    def run(step: int) -> None:
        for block in reversed(range(blocks)):
            check_cancelled()
            if step:
                wait(step - 1, block)
            work(step, block)
            with changed[step]:
                first[step] = block
                changed[step].notify()

    threads = min(share(), steps, blocks)
    for _ in ordered(run, range(steps), threads if threads > 1 else 0):
        pass
