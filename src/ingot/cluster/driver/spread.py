"""Questions about each of many items, answered by many workers: the driver lists the items and collects the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from ingot.artifacts.identity import same_identity
from ingot.artifacts.open import local_text
from ingot.cluster.messages import Task, WorkerLostError
from ingot.cluster.pool import Pool
from ingot.cluster.run_task import OpenJob
from ingot.cluster.scheduler import WorkerStats, run_tasks
from ingot.cluster.tasks import TASK_TYPES, TaskType, runs_of
from ingot.cluster.worker import worker_name
from ingot.core.parsing.strictjson import preload
from ingot.core.runtime.progress import Progress
from ingot.errors import FormatError, IntegrityError

Options = TypeVar("Options", bound=Struct)
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Opened(Generic[Item]):
    """The items that a question is about: a tensor each, or what belongs together; and the identity of the files."""

    items: Sequence[Item]
    identity: Sequence[Any]


@preload
class Files(Struct, Generic[Options], frozen=True, forbid_unknown_fields=True):
    """The files that items lie in: the options by which the driver has opened them, the addresses of those options that
    are paths, and the identity of what the driver found there."""

    options: Options
    addresses: dict[str, str]
    identity: list[Any]


@preload
class ItemsBody(Struct, Generic[Options, Arguments], frozen=True, forbid_unknown_fields=True):
    """A task of some items: the number of each, and the question's arguments for it."""

    files: Files[Options]
    task: Task
    items: list[tuple[Annotated[int, Meta(ge=0)], Arguments]]


@preload
class ItemsResult(Struct, Generic[Result], frozen=True, forbid_unknown_fields=True):
    """The results of a task, one per item."""

    worker: str
    seconds: Annotated[float, Meta(ge=0)]
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Query:
    """A question about one item: the item's number among all, its name, the bytes that are read for it, and the
    question's arguments."""

    number: int
    name: str
    nbytes: int
    arguments: tuple[Any, ...] = ()


class Question(TaskType[Any, Any]):
    """A function of an item, for workers.

    Parameters
    ----------
    options, arguments, result : type
        Types of messages: what ``opened`` gets, what ``function`` gets after the item, and what it returns.
    opened : callable
        Opens the items.
    function : callable
        Returns the answer.
    """

    def __init__(
        self,
        options: type[Options],
        arguments: Any,
        result: Any,
        opened: Callable[[Options], AbstractContextManager[Opened[Item]]],
        function: Callable[..., Any],
    ) -> None:
        body: Any = ItemsBody
        answer: Any = ItemsResult
        super().__init__(body[options, arguments], answer[result], self._answer)
        for cls in (self.body, self.result):
            msgspec.json.Decoder(cls)  # before threads meet at its first use, as ``preload`` says
        self._open = OpenJob[Files[Options], Opened[Item]](lambda files: _opened(opened, files))
        self._function = function

    def _answer(self, body: ItemsBody[Any, Any]) -> ItemsResult[Any]:
        """Run a task, in a worker; errors as ``ask``, and of the function."""
        started = time.perf_counter()
        try:
            items = self._open.opened(body.files).items
            results = [self._function(_item(items, number), *arguments) for number, arguments in body.items]
        except BaseException:
            self.close()
            raise
        return ItemsResult(worker_name(), time.perf_counter() - started, results)

    def close(self) -> None:
        """Close the files of the last task."""
        self._open.close()


def _item(items: Sequence[Item], number: int) -> Item:
    if number >= len(items):
        raise FormatError("cluster.task", f"expected the number of one of {len(items)} items, found {number}")
    return items[number]


def ask(question: str, files: Files[Any], queries: Sequence[Query], pool: Pool, progress: Progress) -> list[Any]:
    """Have workers answer a question about items.

    Parameters
    ----------
    question : str
        The name of a ``Question`` in ``TASK_TYPES``.
    files : Files
    queries : sequence of Query
        The items.
    pool : Pool
        Not closed here: after an error workers may be inside their tasks.
    progress : Progress
        Gets the bytes of every task.

    Returns
    -------
    list
        The result for each item, in order.

    Raises
    ------
    IntegrityError
        ``cluster.source``: a worker found other files than the driver at the addresses.
    UsageError
        ``cluster.version``: a worker has another version of Ingot.
    ResourceError
        As ``run_tasks``; any other error is that of the first item that has one.
    """
    results: dict[int, Sequence[Any]] = {}
    stats = WorkerStats(progress)

    def submit(task: Task) -> Future[ItemsResult[Any]]:
        chosen = queries[task.start : task.stop]
        body = ItemsBody(files, task, [(item.number, item.arguments) for item in chosen])
        return pool.submit(question, body, lambda result: _require_answers(result, chosen))

    def settle(task: Task, result: ItemsResult[Any]) -> None:
        results[task.start] = result.results
        stats.add(result.worker, task.nbytes, result.seconds)

    assert isinstance(TASK_TYPES[question], Question)
    run_tasks(pool, runs_of([item.nbytes for item in queries], pool.slots), submit, settle)
    return [result for _, items in sorted(results.items(), key=lambda pair: pair[0]) for result in items]


def _require_answers(result: ItemsResult[Any], queries: Sequence[Query]) -> None:
    """Refuse a result with other items than the task; of some questions a result states the item's name."""
    names = [getattr(item, "name", None) for item in result.results]
    if len(names) != len(queries) or any(
        name not in (None, item.name) for name, item in zip(names, queries, strict=True)
    ):
        raise WorkerLostError(f"worker {result.worker[:200]} returned a wrong result: of other tensors than the task")


@contextmanager
def _opened(
    opened: Callable[[Options], AbstractContextManager[Opened[Item]]], files: Files[Options]
) -> Iterator[Opened[Item]]:
    """Open items, and prove the files to be those that the driver has opened; errors as ``ask``."""
    texts = {name: local_text(getattr(files.options, name), url) for name, url in files.addresses.items()}
    with opened(structs.replace(files.options, **texts)) as items:
        if not same_identity(items.identity, files.identity):
            raise IntegrityError(
                "cluster.source",
                "the files here are not those that the driver has opened, or were written to since; run again when "
                "they are complete",
                where=worker_name(),
            )
        yield items


def files_of(options: Options, addresses: Mapping[str, str], identity: Sequence[Any]) -> Files[Options]:
    """Return the files of a question, as a message has them."""
    return Files(options, dict(addresses), list(identity))
