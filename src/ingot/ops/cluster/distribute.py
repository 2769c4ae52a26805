"""A plan whose steps are done by many workers: the driver plans, hands out tasks, and publishes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from ingot.core.atomic import TakesOver
from ingot.core.progress import Progress
from ingot.engine.cluster.crew import Crew
from ingot.engine.cluster.elsewhere import elsewhere
from ingot.engine.cluster.notes import Made, Note, Task, note_json, note_of
from ingot.engine.cluster.pool import Pool, worker_name
from ingot.engine.cluster.tasks import runs_of
from ingot.engine.cluster.worker import Kept, PartsFile, Places, Prefixed, has_place, make
from ingot.engine.execute import OBLIVIOUS, Executed, Input, Observer, Target, execute
from ingot.engine.journal import intact
from ingot.engine.plan import Plan
from ingot.engine.resources import Resources
from ingot.formats.base import FormatWriter
from ingot.formats.by_many import Skips, WholeFiles
from ingot.model import bytesource
from ingot.model.artifact import Artifact
from ingot.model.store import Joined, Store
from ingot.stores.local import LocalTarget
from ingot.stores.shared import SharedFolder
from ingot.stores.table import share

_PLAN = "plan.json"
_IN_FLIGHT = 512 << 20  # of a worker without a ceiling: it is not alone on its machine
_LARGEST = 1 << 28
_COPIED = 5_000_000_000  # the largest file that an object store copies by itself


@dataclass(frozen=True, slots=True)
class Cluster:
    """Who does a plan's steps: ``pool`` starts them, or connects to them.

    ``plan`` is the plan as JSON, which ``opened``, a function of a module, opens by its address. ``max_ram`` and
    ``threads`` are each worker's.
    """

    pool: Callable[[], Pool]
    max_ram: int | str | None
    threads: int
    plan: bytes
    opened: Callable[[str], Shared]


class Shared(Protocol):
    """A plan in a worker's process, whose sources are open and proven to be what it was made for."""

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


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told once: how to open the plan, its address, and that of where to leave files; ``files`` is the
    folder in which tensors have their places, where workers see it."""

    opened: Callable[[str], Shared]
    parts: str
    key: str
    files: str | None
    max_ram: int | str | None
    threads: int


def distribute(
    plan: Plan,
    inputs: Sequence[Input],
    target: Target,
    resources: Resources,
    by: Cluster,
    observer: Observer = OBLIVIOUS,
) -> Executed:
    """As ``engine.execute.execute``, whose errors it raises, by workers; and those of ``Cluster.pool`` and ``Crew``."""
    staging, key, progress = target.staging, sha256(by.plan).hexdigest()[:16], resources.progress
    folder = share(staging.share(), create=True)
    folder.write(f"{key}/{_PLAN}", by.plan)
    files = staging.shared_files if plan.size_exact else None
    whole = _whole_files(plan, target) if isinstance(staging, TakesOver) else None
    known = _known(folder, key, LocalTarget(staging.files)) if staging.resuming else []
    done = {item.number for note in known for item in note.made}
    progress.advance(sum(step.in_bytes for number, step in enumerate(plan.steps) if number in done))
    job = Job(by.opened, staging.share(), key, files, by.max_ram, by.threads)
    pool = by.pool()

    def submit(task: Task) -> Future[Note]:
        return pool.submit(work, job, task)

    def beside(place: bytesource.Target, written: Sequence[str]) -> Sequence[str]:
        if whole is not None:
            assert isinstance(staging, TakesOver)
            staging.take_over(crew.whole)
        return target.beside(place, written)

    hashed = [observer.points(step) for step in plan.steps]
    tasks = tasks_of(plan, done, pool.slots, hashed) if whole is None else tasks_by_file(plan, done, whole)
    with Crew(pool, tasks, submit, known, progress) as crew:
        steps = [elsewhere(step, number, crew, folder.store) for number, step in enumerate(plan.steps)]
        quiet = replace(resources, progress=Progress(progress.total))  # the crew tells of what is read

        def reads(written: Store) -> Store:
            return written if whole is None else Joined(written, folder.store, crew.whole)

        shared = replace(target, beside=beside, kept=_ends(known), scattered=whole is not None, reads=reads)
        executed = execute(replace(plan, steps=steps), inputs, shared, quiet, observer)
    return replace(executed, done=[replace(item, step=item.step.origin) for item in executed.done])


def tasks_of(plan: Plan, done: set[int], slots: int, hashed: Sequence[Sequence[int]]) -> list[Task]:
    """Cut the steps that are not done into tasks, of consecutive steps; a step that is more than a worker's share of
    all into several. ``hashed`` are the points of each step whose values are wanted the digests of."""
    sizes = [step.in_bytes for step in plan.steps]
    return runs_of(sizes, slots, done, lambda number: plan.steps[number].pieces(hashed[number]))


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


def _whole_files(plan: Plan, target: Target) -> list[str] | None:
    """Return the file of each step where each of several files can be made as a whole, and copied by a store."""
    artifact = Artifact(plan.specs, plan.metadata, plan.attachments)
    writer = plan.format.writer(LocalTarget(target.staging.files), target.name, artifact, plan.options)
    if not isinstance(writer, WholeFiles) or not all(has_place(step) for step in plan.steps):
        return None
    sizes: dict[str | None, int] = {}
    for spec in plan.specs:
        file = writer.file_of(spec.name)
        sizes[file] = sizes.get(file, 0) + (spec.nbytes or 0)
    if None in sizes or len(sizes) == 1 or max(sizes.values()) > _COPIED:
        return None
    return [writer.file_of(spec.name) or "" for spec in plan.specs]


def _ends(known: Sequence[Note]) -> dict[str, int]:
    """Return the files in which tensors are in their places already, and where the last of each ends."""
    ends: dict[str, int] = {}
    for record in (item.written for note in known for item in note.made if item.written is not None):
        for name, offset, length, _ in record["blobs"]:
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends


def _known(folder: SharedFolder, key: str, files: LocalTarget) -> list[Note]:
    """Return what an interrupted run's workers have left whole, each step once; pieces of steps are done again."""
    states, found, seen = folder.states(key), list[Note](), set[int]()

    def whole(note: Note, made: Made) -> bool:
        if made.written is not None and not note.task.files:
            return intact(made.written, files.store())
        left = dict(zip(note.files, note.states, strict=False))
        wanted = [made.file] if made.written is None else note.files
        return all(states.get(name.rpartition("/")[2]) == left.get(name, "") for name in wanted if name)

    for name in sorted(states):
        if name == _PLAN or not name.endswith(".json"):
            continue
        try:
            note = note_of(folder.store.read(f"{key}/{name}", _LARGEST, "cluster.note"))
        except (ValueError, TypeError, KeyError):
            continue
        made = [item for item in note.made if note.task.rows is None and item.number not in seen and whole(note, item)]
        if note.task.files and len(made) < len(note.made):
            continue  # as a whole or not at all
        seen.update(item.number for item in made)
        found.append(replace(note, made=made))
    return found


class _Opened:
    """A job's plan in a worker's process: the open source, and the writer of the files that others write too."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plan = job.opened(f"{job.parts.rstrip('/')}/{job.key}/{_PLAN}")
        self._places: Places | None = None

    def places(self, number: int) -> Places | None:
        """Return where tensors are put, at one that is not after this; None where that is not known before."""
        if self.job.files is None:
            return None
        if self._places is None or self._places.position > number:
            self._leave()
            self._places = self._writer(LocalTarget(self.job.files))
        return self._places

    def whole(self, target: bytesource.Target) -> Places:
        """Return where the tensors of whole files are put, which are made elsewhere than in the others' place."""
        places = self._writer(target)
        assert places is not None
        return places

    def close(self) -> None:
        """Close all files."""
        self._leave()
        self.plan.close()

    def _leave(self) -> None:
        if self._places is not None:
            self._places.writer.abort()
            self._places = None

    def _writer(self, target: bytesource.Target) -> Places | None:
        writer = self.plan.writer(target)
        return Places(writer, self.plan.names) if isinstance(writer, Skips) else None


_KEPT = Kept[Job, _Opened](lambda job: closing(_Opened(job)))


def work(job: Job, task: Task) -> Note:
    """Do a task, in a worker's process; errors as ``engine.cluster.worker.make`` and of opening the plan."""
    started = time.perf_counter()
    try:
        opened = _KEPT.opened(job)
        resources = Resources(job.max_ram, job.threads, without_ceiling=_IN_FLIGHT)
        numbers = range(task.start, task.stop)
        plan, hashed = opened.plan.plan(numbers), opened.plan.hashed(numbers)
        folder, name = share(job.parts), f"{job.key}/{task.name}.{secrets.token_hex(4)}"
        with folder.adding() as adding:
            parts = PartsFile(adding.files, f"{name}.bin")
            whole = opened.whole(Prefixed(adding.files, f"{name}.")) if task.files else None
            made = make(plan, task, parts, whole or opened.places(task.start), resources, hashed)
            opened.plan.require_unchanged()
            if job.files is not None:
                written = {blob[0] for item in made if item.written for blob in item.written["blobs"]}
                LocalTarget(job.files).flush(sorted(written))
            left = [f"{name}.{file}" for file in task.files] or ([] if parts.is_empty else [parts.name])
            adding.publish(left)
            states = [folder.state(item) for item in left]
        note = Note(task, worker_name(), time.perf_counter() - started, made, left, states)
        folder.write(f"{name}.json", note_json(note))
    except BaseException:
        _KEPT.close()  # a writer may be inside a tensor
        raise
    return note
