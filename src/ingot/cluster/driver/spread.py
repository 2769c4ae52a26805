"""Distribution of a function over many items, such as tensors: workers compute, the driver collects the results."""

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
from ingot.cluster.tasks import TASK_TYPES, TaskType, split_tasks
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
    """The items that a worker opened, such as tensors or pairs of tensors, and the identity of their files."""

    items: Sequence[Item]
    identity: Sequence[Any]


@preload
class Files(Struct, Generic[Options], frozen=True, forbid_unknown_fields=True):
    """The files that contain a question's items, as a message to workers.

    ``options`` are the options with which the driver opened the files. ``addresses`` are the absolute addresses of
    options that are paths, by name. ``identity`` identifies the files that the driver opened.
    """

    options: Options
    addresses: dict[str, str]
    identity: list[Any]


@preload
class ItemsBody(Struct, Generic[Options, Arguments], frozen=True, forbid_unknown_fields=True):
    """A task of several items: the index of each, and the question's arguments for it."""

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
    """An item to which a question's function is applied.

    The fields are its index among all items, its name, the bytes to read, and further arguments of the function.
    """

    index: int
    name: str
    nbytes: int
    arguments: tuple[Any, ...] = ()


class Question(TaskType[Any, Any]):
    """The task type of a function that workers apply to each item of some files.

    Parameters
    ----------
    options, arguments, result : type
        Types of messages: the argument of ``open_items``, the further arguments of ``function``, and its result.
    open_items : callable
        Opens the items.
    function : callable
        Gets an item and the further arguments, and returns the result.
    """

    def __init__(
        self,
        options: type[Options],
        arguments: Any,
        result: Any,
        open_items: Callable[[Options], AbstractContextManager[Opened[Item]]],
        function: Callable[..., Any],
    ) -> None:
        body: Any = ItemsBody
        answer: Any = ItemsResult
        super().__init__(body[options, arguments], answer[result], self._answer)
        for cls in (self.body, self.result):
            msgspec.json.Decoder(cls)  # concurrent first use can crash, see ``preload``
        self._open = OpenJob[Files[Options], Opened[Item]](lambda files: _open_same(open_items, files))
        self._function = function

    def _answer(self, body: ItemsBody[Any, Any]) -> ItemsResult[Any]:
        """Run a task in a worker; raise the errors of ``ask`` and of the function."""
        started = time.perf_counter()
        try:
            items = self._open.opened(body.files).items
            results = [self._function(_item(items, index), *arguments) for index, arguments in body.items]
        except BaseException:
            self.close()
            raise
        return ItemsResult(worker_name(), time.perf_counter() - started, results)

    def close(self) -> None:
        """Close the files of the last task."""
        self._open.close()


def _item(items: Sequence[Item], index: int) -> Item:
    if index >= len(items):
        raise FormatError("cluster.task", f"expected the index of one of {len(items)} items, found {index}")
    return items[index]


def ask(question: str, files: Files[Any], queries: Sequence[Query], pool: Pool, progress: Progress) -> list[Any]:
    """Return the results of a question for all items, computed by workers.

    Parameters
    ----------
    question : str
        The name of a ``Question`` in ``TASK_TYPES``.
    files : Files
    queries : sequence of Query
        One for each item.
    pool : Pool
        The caller closes it; after an error workers may still be running tasks.
    progress : Progress
        Gets the bytes of every task.

    Returns
    -------
    list
        The result for each item, in order.

    Raises
    ------
    IntegrityError
        ``cluster.source``: a worker opened other files at the addresses than the driver.
    UsageError
        ``cluster.version``: a worker has another version of Ingot.
    ResourceError
        The errors of ``run_tasks``. If the question's function raises errors, the error of the first item is raised.
    """
    results: dict[int, Sequence[Any]] = {}
    stats = WorkerStats(progress)

    def submit(task: Task) -> Future[ItemsResult[Any]]:
        task_queries = queries[task.start : task.stop]
        body = ItemsBody(files, task, [(item.index, item.arguments) for item in task_queries])
        return pool.submit(question, body, lambda result: _require_results(result, task_queries))

    def commit(task: Task, result: ItemsResult[Any]) -> None:
        results[task.start] = result.results
        stats.add(result.worker, task.nbytes, result.seconds)

    assert isinstance(TASK_TYPES[question], Question)
    run_tasks(pool, split_tasks([item.nbytes for item in queries], pool.slots), submit, commit)
    return [result for _, items in sorted(results.items(), key=lambda pair: pair[0]) for result in items]


def _require_results(result: ItemsResult[Any], queries: Sequence[Query]) -> None:
    """Raise ``WorkerLostError`` unless a result has one item per query; names of items must be those of the queries."""
    names = [getattr(item, "name", None) for item in result.results]
    if len(names) != len(queries) or any(
        name not in (None, item.name) for name, item in zip(names, queries, strict=True)
    ):
        raise WorkerLostError(f"worker {result.worker[:200]} returned a wrong result: tensors of another task")


@contextmanager
def _open_same(
    open_items: Callable[[Options], AbstractContextManager[Opened[Item]]], files: Files[Options]
) -> Iterator[Opened[Item]]:
    """Open the items of ``files`` in a worker.

    Raises ``IntegrityError`` ``cluster.source`` if the files are not those that the driver opened.
    """
    texts = {name: local_text(getattr(files.options, name), url) for name, url in files.addresses.items()}
    with open_items(structs.replace(files.options, **texts)) as items:
        if not same_identity(items.identity, files.identity):
            raise IntegrityError(
                "cluster.source",
                "the files here are not those that the driver has opened, or have changed since; run again when they "
                "are complete",
                where=worker_name(),
            )
        yield items


def files_of(options: Options, addresses: Mapping[str, str], identity: Sequence[Any]) -> Files[Options]:
    """Return the ``Files`` of a question; see there for the arguments."""
    return Files(options, dict(addresses), list(identity))
