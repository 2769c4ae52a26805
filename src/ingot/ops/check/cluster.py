"""Checks whose tensors are done by many workers: the driver lists and hands out, and gets what each tensor gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ingot
from ingot.core.progress import Progress
from ingot.engine.cluster.handing import Tally, hand_out
from ingot.engine.cluster.notes import Task
from ingot.engine.cluster.pool import pool_of, worker_name
from ingot.engine.cluster.tasks import runs_of
from ingot.engine.cluster.worker import Kept
from ingot.errors import IntegrityError, UsageError
from ingot.ops.identity import same_identity
from ingot.ops.open import path_here

Options = TypeVar("Options")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Opened(Generic[Item]):
    """What a check is of: a tensor, or what belongs together, per item; and what tells the files from others."""

    items: Sequence[Item]
    identity: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Check(Generic[Options, Item, Result]):
    """A check as workers are told of it.

    ``opened`` is a function of a module that opens what ``options`` name as the driver has done it: those that are
    paths have ``addresses``, and ``identity`` tells what the driver found there. ``of`` is one that checks an item.
    """

    opened: Callable[[Options], AbstractContextManager[Opened[Item]]]
    of: Callable[[Item], Result]
    options: Options
    addresses: Mapping[str, str]
    identity: Sequence[Any]
    version: str = ingot.__version__


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """What a worker made of a task."""

    worker: str
    seconds: float
    results: Sequence[Result]


def spread(
    check: Check[Options, Item, Result], sizes: Sequence[int], engine: str, address: str | None, progress: Progress
) -> list[Result]:
    """Have workers do a check.

    Parameters
    ----------
    check : Check
    sizes : sequence of int
        Bytes that each item reads.
    engine, address : str
        As ``engine.cluster.pool.pool_of``.
    progress : Progress
        Told of every task.

    Returns
    -------
    list
        What each item gave, in order.

    Raises
    ------
    IntegrityError
        ``cluster.source``: a worker found other files than the driver at the addresses.
    UsageError
        ``cluster.version``: a worker has another version of Ingot.
    ResourceError, MissingExtraError
        As ``pool_of`` and ``hand_out``; any other error is that of the first item that has one.
    """
    found: dict[int, Sequence[Result]] = {}
    tally, pool = Tally(progress), pool_of(engine, address)

    def submit(task: Task) -> Future[Done[Result]]:
        return pool.submit(work, check, task)

    def settle(task: Task, done: Done[Result]) -> None:
        found[task.start] = done.results
        tally.add(done.worker, task.nbytes, done.seconds)

    try:
        hand_out(pool, runs_of(sizes, pool.slots), submit, settle)
    finally:
        pool.close()
    return [result for _, results in sorted(found.items(), key=lambda item: item[0]) for result in results]


@contextmanager
def _opened(check: Check[Any, Any, Any]) -> Iterator[Opened[Any]]:
    """Open what a check is of, and prove it to be what the driver has opened; errors as ``spread``."""
    if check.version != ingot.__version__:
        raise UsageError(
            f"expected Ingot {check.version} as the driver has it, found {ingot.__version__}: install the same one",
            rule="cluster.version",
            where=worker_name(),
        )
    paths = {name: path_here(getattr(check.options, name), url) for name, url in check.addresses.items()}
    with check.opened(replace(check.options, **paths)) as opened:
        if not same_identity(opened.identity, check.identity):
            raise IntegrityError(
                "cluster.source",
                "expected the files that the driver has opened, found others, or ones that were written to since",
                where=worker_name(),
            )
        yield opened


_KEPT = Kept[Check[Any, Any, Any], Opened[Any]](_opened)


def work(check: Check[Options, Item, Result], task: Task) -> Done[Result]:
    """Do a task, in a worker's process; errors as ``spread``, and of the check."""
    started = time.perf_counter()
    try:
        results = [check.of(item) for item in _KEPT.opened(check).items[task.start : task.stop]]
    except BaseException:
        _KEPT.close()
        raise
    return Done(worker_name(), time.perf_counter() - started, results)
