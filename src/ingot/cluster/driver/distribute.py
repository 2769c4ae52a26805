"""A plan whose steps are done by many workers: the driver plans, hands out tasks, checks results, and publishes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Protocol

from msgspec import Struct

from ingot.cluster import messages
from ingot.cluster.driver.results import ResultCheck
from ingot.cluster.messages import InvalidMessageError, Task, TaskResult, Token, WorkerLostError
from ingot.cluster.pool import Pool
from ingot.cluster.remote_step import remote_step
from ingot.cluster.run_task import (
    OpenJob,
    PartsFile,
    PrefixedTarget,
    SharedWriter,
    has_fixed_place,
    run_task,
)
from ingot.cluster.task_runner import TaskRunner
from ingot.cluster.tasks import TaskType, runs_of
from ingot.cluster.worker import worker_name
from ingot.core.parsing.strictjson import warm
from ingot.core.runtime.progress import Progress
from ingot.engine.execute import NULL_OBSERVER, Executed, Input, Observer, Target, execute
from ingot.engine.resources import Resources
from ingot.engine.work import Plan
from ingot.errors import FormatError
from ingot.formats.base import FormatWriter
from ingot.formats.by_many import Skips, WholeFiles
from ingot.model import bytesource
from ingot.model.artifact import Artifact
from ingot.model.store import MergedStore, Store
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location
from ingot.stores.shared import SharedFolder

_PLAN = "plan.json"
_IN_FLIGHT = 512 << 20  # of a worker without a ceiling: it is not alone on its machine
_COPIED = 5_000_000_000  # the largest file that an object store copies by itself


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers of a plan's steps: ``pool`` starts them, or connects to them.

    ``plan`` is the plan as JSON, ``task_type`` the type of its tasks, in ``TASK_TYPES``. ``max_ram`` and ``threads``
    are each worker's.
    """

    pool: Callable[[], Pool]
    max_ram: int | str | None
    threads: int
    plan: bytes
    task_type: str


class Shared(Protocol):
    """A plan in a worker, whose sources are open and proven to be those that it was made for."""

    @property
    def names(self) -> Sequence[str]:
        """The tensors that all its steps write, in order."""
        ...

    def plan(self, numbers: range) -> Plan:
        """Return the plan of some of its steps; raises ``FormatError`` ``plan.step``."""
        ...

    def hashed(self, numbers: range) -> Sequence[Sequence[int]]:
        """Return the points of each of these steps whose values are hashed."""
        ...

    def writer(self, target: bytesource.Target) -> FormatWriter:
        """Return a writer of all tensors."""
        ...

    def require_unchanged(self) -> None:
        """Refuse sources that were written to since they were opened."""
        ...

    def close(self) -> None:
        """Close the sources."""
        ...


@warm
class Job(Struct, frozen=True, forbid_unknown_fields=True):
    """The common part of all tasks of a plan.

    ``parts`` is the address of the folder that workers leave files in, ``key`` the folder in it that has the plan, and
    ``files`` the path of the folder in which tensors have their final places. The rest are each worker's resources.
    """

    parts: str
    key: str
    files: str | None
    max_ram: int | str | None
    threads: int


@warm
class StepsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A task of some steps. Files of this attempt have its token in their names, so that no other attempt has them."""

    job: Job
    task: Task
    attempt: Token


def distribute(
    plan: Plan,
    inputs: Sequence[Input],
    target: Target,
    resources: Resources,
    by: Cluster,
    observer: Observer = NULL_OBSERVER,
) -> Executed:
    """As ``engine.execute.execute``, whose errors it raises, by workers; and those of ``Cluster.pool`` and
    ``TaskRunner``."""
    staging, key, progress = target.staging, sha256(by.plan).hexdigest()[:16], resources.progress
    parts = Location.parse(staging.share())
    folder = parts.share(create=True)
    folder.write(f"{key}/{_PLAN}", by.plan)
    files = staging.shared_files if plan.size_exact else None
    in_full = _files_in_full(plan, target) if staging.takes_over else None
    hashed = [observer.points(step) for step in plan.steps]
    is_shared = files is not None and in_full is None
    checks = ResultCheck(plan, target, hashed, folder, key, shared=is_shared, in_full=in_full is not None)
    earlier = _earlier(folder, key, checks) if staging.resuming else []
    done = {item.number for result in earlier for item in result.steps}
    progress.advance(sum(step.in_bytes for number, step in enumerate(plan.steps) if number in done))
    job = Job(parts.text, key, files, by.max_ram, by.threads)
    pool = by.pool()

    def submit(task: Task) -> Future[TaskResult]:
        attempt = secrets.token_hex(4)
        checks.prepare(task)
        check = partial(checks.check, task=task, attempt=attempt, parts=pool.is_local, places=pool.is_local)
        future = pool.submit(by.task_type, StepsBody(job, task, attempt), check)
        future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else checks.forget(task))
        return future

    def beside(destination: bytesource.Target, written: Sequence[str]) -> Sequence[str]:
        if in_full is not None:
            staging.take_over(runner.files)
        return target.copy_companions(destination, written)

    tasks = tasks_of(plan, done, pool.slots, hashed) if in_full is None else tasks_by_file(plan, done, in_full)
    with TaskRunner(pool, tasks, submit, earlier, progress, checks.fits) as runner:
        steps = [remote_step(step, number, runner, folder.store) for number, step in enumerate(plan.steps)]
        quiet = replace(resources, progress=Progress(progress.total))  # the runner counts source bytes

        def reads(written: Store) -> Store:
            return written if in_full is None else MergedStore(written, folder.store, runner.files)

        kept, scattered = _ends(earlier), in_full is not None
        shared = replace(target, copy_companions=beside, kept_bytes=kept, scattered=scattered, reads=reads)
        executed = execute(replace(plan, steps=steps), inputs, shared, quiet, observer)
    return replace(executed, done=[replace(item, step=item.step.planned) for item in executed.done])


def tasks_of(plan: Plan, done: set[int], slots: int, hashed: Sequence[Sequence[int]]) -> list[Task]:
    """Cut the steps that are not done into tasks, of consecutive steps; a step that is more than a worker's share of
    all into several. ``hashed`` are the points of each step whose values are hashed."""
    sizes = [step.in_bytes for step in plan.steps]
    return runs_of(sizes, slots, done, lambda number: plan.steps[number].row_ranges(hashed[number]))


def tasks_by_file(plan: Plan, done: set[int], files: Sequence[str]) -> list[Task]:
    """Return a task for each file of the result, ``files`` by the steps, of which not every step is done.

    A file whose steps have those of others among them goes into one task with them.
    """
    last = {file: number for number, file in enumerate(files)}
    tasks: list[Task] = []
    start = stop = 0
    for number, file in enumerate(files):
        stop = max(stop, last[file] + 1)
        if number + 1 == stop:
            steps = range(start, stop)
            if not done.issuperset(steps):
                nbytes = sum(plan.steps[step].in_bytes for step in steps)
                tasks.append(Task(start, stop, nbytes, files=tuple(dict.fromkeys(files[start:stop]))))
            start = stop
    return tasks


def _files_in_full(plan: Plan, target: Target) -> list[str] | None:
    """Return the file of each step if each of several files can be made in full, and copied by a store."""
    artifact = Artifact(plan.specs, plan.metadata, plan.attachments)
    writer = plan.format.writer(LocalTarget(target.staging.files), target.name, artifact, plan.options)
    if not isinstance(writer, WholeFiles) or not all(has_fixed_place(step) for step in plan.steps):
        return None
    sizes: dict[str | None, int] = {}
    for spec in plan.specs:
        file = writer.file_of(spec.name)
        sizes[file] = sizes.get(file, 0) + (spec.nbytes or 0)
    if None in sizes or len(sizes) == 1 or max(sizes.values()) > _COPIED:
        return None
    return [writer.file_of(spec.name) or "" for spec in plan.specs]


def _ends(earlier: Sequence[TaskResult]) -> dict[str, int]:
    """Return the files in which tensors are in their places already, and where the last of each ends."""
    ends: dict[str, int] = {}
    for record in (item.written for result in earlier for item in result.steps if item.written is not None):
        for name, offset, length, _ in record["blobs"]:
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends


def _earlier(folder: SharedFolder, key: str, checks: ResultCheck) -> list[TaskResult]:
    """Return what an interrupted run's workers have finished and is still there, each step once.

    Rows of steps are done again. Of files in buckets the store's names of versions are compared.
    """
    results: list[TaskResult] = []
    for name in folder.states(key):
        if name != _PLAN and name.endswith(".json"):
            try:
                result = messages.decode(
                    folder.store.read(f"{key}/{name}", messages.LARGEST, "cluster.note"), TaskResult
                )
            except InvalidMessageError:
                continue
            if name == f"{result.task.name}.{result.attempt}.json" and result.task.rows is None:
                results.append(result)
    earlier = list[TaskResult]()
    seen = set[int]()
    for result in sorted(results, key=lambda item: item.task.start):
        if seen.isdisjoint(range(result.task.start, result.task.stop)) and _is_there(result, checks):
            seen.update(range(result.task.start, result.task.stop))
            earlier.append(result)
    return earlier


def _is_there(result: TaskResult, checks: ResultCheck) -> bool:
    checks.prepare(result.task)
    try:
        checks.check(result, result.task, result.attempt, parts=False, places=True)
    except WorkerLostError:
        return False
    finally:
        checks.forget(result.task)
    return True


class _Opened:
    """A job's plan in a worker: the open sources, and the writer of the files that other workers write too."""

    def __init__(self, opened: Callable[[Location], Shared], job: Job) -> None:
        self.job = job
        self.plan = opened(Location.parse(job.parts).child(job.key).child(_PLAN))
        self._placed: SharedWriter | None = None

    def placed(self, number: int) -> SharedWriter | None:
        """Return the writer of final places, at a tensor that is not after this one; None if there are none."""
        if self.job.files is None:
            return None
        if self._placed is None or self._placed.position > number:
            self._leave()
            self._placed = self._writer(LocalTarget(self.job.files))
        return self._placed

    def in_full(self, target: bytesource.Target) -> SharedWriter:
        """Return the writer of files that this worker makes in full, in another folder than the final one."""
        writer = self._writer(target)
        assert writer is not None
        return writer

    def close(self) -> None:
        """Close all files."""
        self._leave()
        self.plan.close()

    def _leave(self) -> None:
        if self._placed is not None:
            self._placed.writer.abort()
            self._placed = None

    def _writer(self, target: bytesource.Target) -> SharedWriter | None:
        writer = self.plan.writer(target)
        return SharedWriter(writer, self.plan.names) if isinstance(writer, Skips) else None


def _require_rows(task: Task, plan: Plan, hashed: Sequence[Sequence[int]]) -> None:
    """Refuse rows of a task that its step cannot be cut at."""
    if task.rows is None:
        return
    start, stop = task.rows
    cut = plan.steps[0].row_ranges(hashed[0]) if len(plan.steps) == 1 else None
    if cut is None or not start < stop <= cut[0] or start % cut[1] or (stop % cut[1] and stop != cut[0]):
        raise FormatError("cluster.task", f"step {task.start} cannot be cut into rows {start} to {stop}")


class StepsType(TaskType[StepsBody, TaskResult]):
    """Tasks of plans that a function opens by location; the last plan stays open."""

    def __init__(self, opened: Callable[[Location], Shared]) -> None:
        super().__init__(StepsBody, TaskResult, self._run_or_close)
        self._open = OpenJob[Job, _Opened](lambda job: closing(_Opened(opened, job)))

    def close(self) -> None:
        """Close the plan."""
        self._open.close()

    def opened(self, job: Job) -> _Opened:
        """Return a job's plan, which is opened if another job's was open."""
        return self._open.opened(job)

    def _run_or_close(self, body: StepsBody) -> TaskResult:
        """Run a task; errors as ``cluster.run_task.run_task`` and of opening the plan."""
        try:
            return self._run(body)
        except BaseException:
            self.close()  # a writer may be inside a tensor
            raise

    def _run(self, body: StepsBody) -> TaskResult:
        started = time.perf_counter()
        job = body.job
        task = body.task
        opened = self.opened(job)
        resources = Resources(job.max_ram, job.threads, without_ceiling=_IN_FLIGHT)
        numbers = range(task.start, task.stop)
        if not task.start < task.stop <= len(opened.plan.names):
            raise FormatError("cluster.task", f"the plan has no steps {task.start} to {task.stop - 1}")
        plan = opened.plan.plan(numbers)
        hashed = opened.plan.hashed(numbers)
        _require_rows(task, plan, hashed)
        folder, name = Location.parse(job.parts).share(), f"{job.key}/{task.name}.{body.attempt}"
        with folder.adding() as adding:
            parts = PartsFile(adding.files, f"{name}.bin")
            in_full = opened.in_full(PrefixedTarget(adding.files, f"{name}.")) if task.files else None
            steps = run_task(plan, task, parts, in_full or opened.placed(task.start), resources, hashed)
            opened.plan.require_unchanged()
            if job.files is not None:
                written = {blob[0] for item in steps if item.written for blob in item.written["blobs"]}
                LocalTarget(job.files).flush(sorted(written))
            files = [f"{name}.{file}" for file in task.files] or ([] if parts.is_empty else [parts.name])
            adding.publish(files)
            states = [folder.state(item) for item in files]
        result = TaskResult(task, body.attempt, worker_name(), time.perf_counter() - started, steps, files, states)
        folder.write(f"{name}.json", messages.encode(result))
        return result
