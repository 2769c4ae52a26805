"""Execute a plan by many workers: the driver plans, distributes tasks, checks results, and publishes."""

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
    has_fixed_offset,
    run_task,
)
from ingot.cluster.task_runner import TaskRunner
from ingot.cluster.tasks import TaskType, split_tasks
from ingot.cluster.worker import worker_name
from ingot.core.parsing.strictjson import preload
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
_IN_FLIGHT = 512 << 20  # memory in bytes of a worker without max_ram, because it shares its machine
_MAX_COPY_BYTES = 5_000_000_000  # the largest file that an object store copies on the server


@dataclass(frozen=True, slots=True)
class Cluster:
    """The arguments for running a plan's steps on workers.

    ``pool`` starts the workers or connects to them. ``plan`` is the plan as JSON. ``task_type`` is the name in
    ``TASK_TYPES`` of the type of its tasks. ``max_ram`` and ``threads`` apply to each worker.
    """

    pool: Callable[[], Pool]
    max_ram: int | str | None
    threads: int
    plan: bytes
    task_type: str


class Shared(Protocol):
    """A plan that a worker opened.

    Its sources are open and have the identity that the plan declares. Methods take the indices of steps.
    """

    @property
    def names(self) -> Sequence[str]:
        """The names of the tensors of all steps, in order."""
        ...

    def plan(self, indices: range) -> Plan:
        """Return a plan with only the steps at ``indices``.

        Raises ``FormatError`` ``plan.step`` if a step does not match its source or the format.
        """
        ...

    def hashed(self, indices: range) -> Sequence[Sequence[int]]:
        """Return, for each step at ``indices``, the points (``Observer.points``) at which its values are hashed."""
        ...

    def writer(self, target: bytesource.Target) -> FormatWriter:
        """Return a writer for all tensors of the plan."""
        ...

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` if a file of the sources has changed since it was opened."""
        ...

    def close(self) -> None:
        """Close the files of the plan's sources."""
        ...


@preload
class Job(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that all tasks of a plan share.

    ``parts`` is the address of the folder into which workers write files, and ``key`` its subfolder with the plan.
    If workers write tensors at their final offsets, ``files`` is the path of the folder with the artifact's files, else
    None. ``max_ram`` and ``threads`` are the resources of each worker.
    """

    parts: str
    key: str
    files: str | None
    max_ram: int | str | None
    threads: int


@preload
class StepsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a task message: consecutive steps of a plan.

    ``attempt`` is a token of this attempt to run the task. File names contain it, so that attempts share no file.
    """

    job: Job
    task: Task
    attempt: Token


def distribute(
    plan: Plan,
    inputs: Sequence[Input],
    target: Target,
    resources: Resources,
    cluster: Cluster,
    observer: Observer = NULL_OBSERVER,
) -> Executed:
    """Execute a plan by workers; the driver writes and publishes as in ``engine.execute.execute``.

    Raises the errors of ``execute``, ``Cluster.pool`` and ``TaskRunner``.
    """
    staging = target.staging
    key = sha256(cluster.plan).hexdigest()[:16]
    progress = resources.progress
    parts = Location.parse(staging.share())
    folder = parts.share(create=True)
    folder.write(f"{key}/{_PLAN}", cluster.plan)
    files = staging.shared_files if plan.size_exact else None
    files_by_step = _files_by_step(plan, target) if staging.takes_over else None
    in_full = files_by_step is not None
    hashed = [observer.points(step) for step in plan.steps]
    is_shared = files is not None and not in_full
    checks = ResultCheck(plan, target, hashed, folder, key, shared=is_shared, in_full=in_full)
    earlier = _earlier_results(folder, key, checks) if staging.resuming else []
    finished = {item.number for result in earlier for item in result.steps}
    progress.advance(sum(step.in_bytes for index, step in enumerate(plan.steps) if index in finished))
    job = Job(parts.text, key, files, cluster.max_ram, cluster.threads)
    pool = cluster.pool()

    def submit(task: Task) -> Future[TaskResult]:
        attempt = secrets.token_hex(4)
        checks.prepare(task)
        check = partial(checks.check, task=task, attempt=attempt, parts=pool.is_local, placed=pool.is_local)
        future = pool.submit(cluster.task_type, StepsBody(job, task, attempt), check)
        future.add_done_callback(lambda item: None if item.cancelled() or item.exception() else checks.forget(task))
        return future

    def write_siblings(destination: bytesource.Target, written: Sequence[str]) -> Sequence[str]:
        if in_full:
            staging.take_over(runner.files)
        return target.copy_companions(destination, written)

    if files_by_step is None:
        tasks = tasks_of(plan, finished, pool.slots, hashed)
    else:
        tasks = tasks_by_file(plan, finished, files_by_step)
    with TaskRunner(pool, tasks, submit, earlier, progress, checks.fits) as runner:
        steps = [remote_step(step, index, runner, folder.store) for index, step in enumerate(plan.steps)]
        quiet = replace(resources, progress=Progress(progress.total))  # the runner counts source bytes

        def reads(written: Store) -> Store:
            return MergedStore(written, folder.store, runner.files) if in_full else written

        ends = _placed_ends(earlier)
        shared = replace(target, copy_companions=write_siblings, kept_bytes=ends, scattered=in_full, reads=reads)
        executed = execute(replace(plan, steps=steps), inputs, shared, quiet, observer)
    return replace(executed, completed=[replace(item, step=item.step.planned) for item in executed.completed])


def tasks_of(plan: Plan, finished: set[int], slots: int, hashed: Sequence[Sequence[int]]) -> list[Task]:
    """Return tasks for the unfinished steps: each has consecutive steps, or a range of rows of one large step.

    ``finished`` are the indices of finished steps, and ``slots`` is the number of workers. ``hashed`` are the points of
    each step at which values are hashed.
    """
    sizes = [step.in_bytes for step in plan.steps]
    return split_tasks(sizes, slots, finished, lambda index: plan.steps[index].row_ranges(hashed[index]))


def tasks_by_file(plan: Plan, finished: set[int], files: Sequence[str]) -> list[Task]:
    """Return a task for each file of the result that has an unfinished step.

    ``files`` is the file of each step. Files whose steps are interleaved share a task.
    """
    last = {file: index for index, file in enumerate(files)}
    tasks: list[Task] = []
    start = stop = 0
    for index, file in enumerate(files):
        stop = max(stop, last[file] + 1)
        if index + 1 == stop:
            steps = range(start, stop)
            if not finished.issuperset(steps):
                nbytes = sum(plan.steps[step].in_bytes for step in steps)
                tasks.append(Task(start, stop, nbytes, files=tuple(dict.fromkeys(files[start:stop]))))
            start = stop
    return tasks


def _files_by_step(plan: Plan, target: Target) -> list[str] | None:
    """Return the file of each step if workers can write full files of the result, else None.

    They can if the plan alone determines the offset of each tensor, the result has several files, and the object store
    can copy each file.
    """
    artifact = Artifact(plan.specs, plan.metadata, plan.attachments)
    writer = plan.format.writer(LocalTarget(target.staging.files), target.name, artifact, plan.options)
    if not isinstance(writer, WholeFiles) or not all(has_fixed_offset(step) for step in plan.steps):
        return None
    sizes: dict[str | None, int] = {}
    for spec in plan.specs:
        file = writer.file_of(spec.name)
        sizes[file] = sizes.get(file, 0) + (spec.nbytes or 0)
    if None in sizes or len(sizes) == 1 or max(sizes.values()) > _MAX_COPY_BYTES:
        return None
    return [writer.file_of(spec.name) or "" for spec in plan.specs]


def _placed_ends(earlier: Sequence[TaskResult]) -> dict[str, int]:
    """Return the end of the last tensor that an earlier run wrote at its final offset, by file."""
    ends: dict[str, int] = {}
    for record in (item.written for result in earlier for item in result.steps if item.written is not None):
        for name, offset, length, _ in record["blobs"]:
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends


def _earlier_results(folder: SharedFolder, key: str, checks: ResultCheck) -> list[TaskResult]:
    """Return the valid results of an interrupted run; no two contain the same step.

    Results for ranges of rows are not used. In a bucket, the files must have the versions that the results state.
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
        if seen.isdisjoint(range(result.task.start, result.task.stop)) and _is_valid(result, checks):
            seen.update(range(result.task.start, result.task.stop))
            earlier.append(result)
    return earlier


def _is_valid(result: TaskResult, checks: ResultCheck) -> bool:
    """Return whether the bytes of an earlier run's result still exist and are intact."""
    checks.prepare(result.task)
    try:
        checks.check(result, result.task, result.attempt, parts=False, placed=True)
    except WorkerLostError:
        return False
    finally:
        checks.forget(result.task)
    return True


class _OpenedJob:
    """A job that a worker opened: its plan with open sources, and the writer of files that several workers write."""

    def __init__(self, open_plan: Callable[[Location], Shared], job: Job) -> None:
        self.job = job
        self.plan = open_plan(Location.parse(job.parts).child(job.key).child(_PLAN))
        self._placed_writer: SharedWriter | None = None

    def placed_writer(self, index: int) -> SharedWriter | None:
        """Return the writer that writes at the final offsets, positioned at or before tensor ``index``.

        Returns None if workers of the job do not write at final offsets.
        """
        if self.job.files is None:
            return None
        if self._placed_writer is None or self._placed_writer.position > index:
            self._abort_writer()
            self._placed_writer = self._writer(LocalTarget(self.job.files))
        return self._placed_writer

    def full_file_writer(self, target: bytesource.Target) -> SharedWriter:
        """Return a writer for files that this worker writes in full into ``target``, which is not the final folder."""
        writer = self._writer(target)
        assert writer is not None
        return writer

    def close(self) -> None:
        """Close the plan's sources and the writer."""
        self._abort_writer()
        self.plan.close()

    def _abort_writer(self) -> None:
        if self._placed_writer is not None:
            self._placed_writer.writer.abort()
            self._placed_writer = None

    def _writer(self, target: bytesource.Target) -> SharedWriter | None:
        writer = self.plan.writer(target)
        return SharedWriter(writer, self.plan.names) if isinstance(writer, Skips) else None


def _require_rows(task: Task, plan: Plan, hashed: Sequence[Sequence[int]]) -> None:
    """Raise ``FormatError`` ``cluster.task`` if a task is a range of rows into which its step cannot be split."""
    if task.rows is None:
        return
    start, stop = task.rows
    split = plan.steps[0].row_ranges(hashed[0]) if len(plan.steps) == 1 else None
    if split is None or not start < stop <= split[0] or start % split[1] or (stop % split[1] and stop != split[0]):
        raise FormatError("cluster.task", f"step {task.start} cannot be split into rows {start} to {stop}")


class StepsType(TaskType[StepsBody, TaskResult]):
    """The task type of plans that ``open_plan`` opens; the last plan stays open."""

    def __init__(self, open_plan: Callable[[Location], Shared]) -> None:
        super().__init__(StepsBody, TaskResult, self._run_or_close)
        self._open = OpenJob[Job, _OpenedJob](lambda job: closing(_OpenedJob(open_plan, job)))

    def close(self) -> None:
        """Close the plan that the last task left open."""
        self._open.close()

    def opened(self, job: Job) -> _OpenedJob:
        """Return an opened job; the plan of another job is closed first."""
        return self._open.opened(job)

    def _run_or_close(self, body: StepsBody) -> TaskResult:
        """Run a task; raise the errors of ``cluster.run_task.run_task`` and of opening the plan."""
        try:
            return self._run(body)
        except BaseException:
            self.close()  # a tensor may be incomplete in the writer
            raise

    def _run(self, body: StepsBody) -> TaskResult:
        started = time.perf_counter()
        job = body.job
        task = body.task
        opened = self.opened(job)
        resources = Resources(job.max_ram, job.threads, without_ceiling=_IN_FLIGHT)
        indices = range(task.start, task.stop)
        if not task.start < task.stop <= len(opened.plan.names):
            raise FormatError("cluster.task", f"the plan has no steps {task.start} to {task.stop - 1}")
        plan = opened.plan.plan(indices)
        hashed = opened.plan.hashed(indices)
        _require_rows(task, plan, hashed)
        folder = Location.parse(job.parts).share()
        name = f"{job.key}/{task.name}.{body.attempt}"
        with folder.stage() as adding:
            parts = PartsFile(adding.files, f"{name}.bin")
            if task.files:
                writer: SharedWriter | None = opened.full_file_writer(PrefixedTarget(adding.files, f"{name}."))
            else:
                writer = opened.placed_writer(task.start)
            steps = run_task(plan, task, parts, writer, resources, hashed)
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
