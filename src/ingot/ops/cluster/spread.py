"""What is asked of each of many items, by many workers: the driver lists and hands out, and gets what each gave."""

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
from ingot.engine.cluster.pool import Pool, worker_name
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
    """What an inquiry is of: a tensor, or what belongs together, per item; and what tells the files from others."""

    items: Sequence[Item]
    identity: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Inquiry(Generic[Options, Item, Result]):
    """What is asked of items, as workers are told of it.

    ``opened`` is a function of a module that opens what ``options`` name as the driver has done it: those that are
    paths have ``addresses``, and ``identity`` tells what the driver found there. ``of`` is what is asked of an item,
    something that can be pickled and compared.
    """

    opened: Callable[[Options], AbstractContextManager[Opened[Item]]]
    of: Callable[..., Result]
    options: Options
    addresses: Mapping[str, str]
    identity: Sequence[Any]
    version: str = ingot.__version__


@dataclass(frozen=True, slots=True)
class Wanted:
    """An item by its number among all, the bytes that are read for it, and what is ``told`` of it beside."""

    number: int
    nbytes: int
    told: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """What a worker made of a task."""

    worker: str
    seconds: float
    results: Sequence[Result]


def spread(
    inquiry: Inquiry[Options, Item, Result], wanted: Sequence[Wanted], pool: Pool, progress: Progress
) -> list[Result]:
    """Have workers answer an inquiry.

    Parameters
    ----------
    inquiry : Inquiry
    wanted : sequence of Wanted
        The items that it is of.
    pool : Pool
        Not closed here: after an error workers may be inside of their tasks.
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
    ResourceError
        As ``hand_out``; any other error is that of the first item that has one.
    """
    found: dict[int, Sequence[Result]] = {}
    tally = Tally(progress)

    def submit(task: Task) -> Future[Done[Result]]:
        return pool.submit(work, inquiry, task, [(item.number, item.told) for item in wanted[task.start : task.stop]])

    def settle(task: Task, done: Done[Result]) -> None:
        found[task.start] = done.results
        tally.add(done.worker, task.nbytes, done.seconds)

    hand_out(pool, runs_of([item.nbytes for item in wanted], pool.slots), submit, settle)
    return [result for _, results in sorted(found.items(), key=lambda item: item[0]) for result in results]


@contextmanager
def _opened(inquiry: Inquiry[Any, Any, Any]) -> Iterator[Opened[Any]]:
    """Open what an inquiry is of, and prove it to be what the driver has opened; errors as ``spread``."""
    if inquiry.version != ingot.__version__:
        raise UsageError(
            f"expected Ingot {inquiry.version} as the driver has it, found {ingot.__version__}: install the same one",
            rule="cluster.version",
            where=worker_name(),
        )
    paths = {name: path_here(getattr(inquiry.options, name), url) for name, url in inquiry.addresses.items()}
    with inquiry.opened(replace(inquiry.options, **paths)) as opened:
        if not same_identity(opened.identity, inquiry.identity):
            raise IntegrityError(
                "cluster.source",
                "expected the files that the driver has opened, found others, or ones that were written to since",
                where=worker_name(),
            )
        yield opened


_KEPT = Kept[Inquiry[Any, Any, Any], Opened[Any]](_opened)


def work(
    inquiry: Inquiry[Options, Item, Result], task: Task, wanted: Sequence[tuple[int, tuple[Any, ...]]]
) -> Done[Result]:
    """Do a task, in a worker's process; errors as ``spread``, and of what is asked."""
    started = time.perf_counter()
    try:
        items = _KEPT.opened(inquiry).items
        results = [inquiry.of(items[number], *told) for number, told in wanted]
    except BaseException:
        _KEPT.close()
        raise
    return Done(worker_name(), time.perf_counter() - started, results)
