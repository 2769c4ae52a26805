"""Checks of a worker's results, which the driver makes before it uses them: a worker may be broken, and not notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ingot.cluster import messages
from ingot.cluster.messages import (
    Digest,
    InvalidMessageError,
    StepResult,
    Task,
    TaskResult,
    WorkerLostError,
)
from ingot.cluster.run_task import SharedWriter, has_fixed_place, is_fitted
from ingot.core.bytes import checksums
from ingot.engine.data import from_json_value
from ingot.engine.execute import Target
from ingot.engine.work import Plan, Step
from ingot.errors import IngotError
from ingot.formats.by_many import BlobLocation, OpenFiles, Read, Skips, read_place
from ingot.model.bytesource import Buffer
from ingot.model.spec import TensorSpec
from ingot.stores.local import LocalStore
from ingot.stores.shared import SharedFolder


class ResultCheck:
    """Compares the results of tasks with the plan, with the layout of the files, and with the bytes that were left.

    Parameters
    ----------
    plan : Plan
        Of all steps.
    target : Target
    hashed : sequence
        The points of each step at which values are hashed.
    folder : SharedFolder
        Where workers leave files, under names that begin with ``key``.
    shared : bool
        Whether workers write tensors into their final places, in ``target.staging``.
    in_full : bool
        Whether workers make files of the result in full.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        hashed: Sequence[Sequence[int]],
        folder: SharedFolder,
        key: str,
        *,
        shared: bool,
        in_full: bool,
    ) -> None:
        self._plan = plan
        self._target = target
        self._hashed = hashed
        self._folder = folder
        self._key = key
        self._files = LocalStore(target.staging.files, "pread") if shared else None
        self._is_placed = shared or in_full
        self._writer: SharedWriter | None = None
        self._places: dict[Task, list[list[BlobLocation]]] = {}

    def prepare(self, task: Task) -> None:
        """Find out where the tensors of a task lie. Tasks come in the order of their steps, or cost more time."""
        if task in self._places or task.rows is not None or not self._is_placed:
            return
        if self._writer is None or self._writer.position > task.start:
            self._writer = self._new_writer()
        if self._writer is None:
            self._is_placed = False
            return
        places: list[list[BlobLocation]] = []
        for number in range(task.start, task.stop):
            self._writer.skip_to(number)
            step = self._plan.steps[number]
            places.append(self._writer.writer.locate(step.spec.name) if has_fixed_place(step) else [])
        self._places[task] = places

    def forget(self, task: Task) -> None:
        """Let go of what ``prepare`` found out."""
        self._places.pop(task, None)

    def check(self, result: TaskResult, task: Task, attempt: str, *, parts: bool, places: bool) -> None:
        """Check a result of a task.

        ``parts`` and ``places`` say whether bytes are read again, those that wait for the driver and those in their
        final places. Raises ``WorkerLostError`` if the worker cannot have done this task.
        """
        try:
            _require_same(result, task, attempt)
            self._require_files(result)
            with OpenFiles(self._files or self._folder.store) as files:
                self._require_steps(result, files.read if places and self._files and not task.files else None)
            with OpenFiles(self._folder.store) as files:
                for item in result.steps if parts else ():
                    _require_crc(item, files.read)
        except (InvalidMessageError, IngotError) as error:
            raise WorkerLostError(f"worker {result.worker[:200]} returned a wrong result: {error}") from error

    def fits(self, number: int, results: Sequence[StepResult]) -> bool:
        """Whether results of a step, or of all its rows in order, have the bytes of each part that the plan states."""
        if any(item.written is not None for item in results):
            return len(results) == 1
        return _sizes_fit(self._plan.steps[number].spec, results)

    def _name(self, result: TaskResult) -> str:
        return f"{self._key}/{result.task.name}.{result.attempt}"

    def _require_files(self, result: TaskResult) -> None:
        name = self._name(result)
        files = [f"{name}.{file}" for file in result.task.files]
        if not files and any(item.written is None and item.nbytes for item in result.steps):
            files = [f"{name}.bin"]
        if result.files != files:
            raise InvalidMessageError(f"expected the files {files[:3]}, found {result.files[:3]}")
        if [self._folder.state(file) for file in files] != result.states:
            raise InvalidMessageError("the files have another size, or another version")

    def _require_steps(self, result: TaskResult, read: Read | None) -> None:
        task = result.task
        end = 0
        if [item.number for item in result.steps] != list(range(task.start, task.stop)):
            raise InvalidMessageError("the result has other steps than the task")
        for item, places in zip(result.steps, self._places_of(task), strict=True):
            step = self._plan.steps[item.number]
            if places is not None:
                self._require_record(step, item, places, read)
            else:
                self._require_part(result, item, end)
                end += item.nbytes
            _require_params(step, item)
            if task.rows is None:
                _require_digests(item, self._hashed[item.number])
        if not task.files and end and result.states != [str(end)] and not result.states[0].startswith(f"{end} "):
            raise InvalidMessageError(f"expected {end} bytes in the file")

    def _places_of(self, task: Task) -> Iterator[list[BlobLocation] | None]:
        """Yield the places of each step of a task; None for one whose bytes wait for the driver."""
        located = self._places.get(task)
        for offset, number in enumerate(range(task.start, task.stop)):
            placed = located is not None and has_fixed_place(self._plan.steps[number])
            yield located[offset] if placed and located is not None else None

    def _require_record(self, step: Step, item: StepResult, places: Sequence[BlobLocation], read: Read | None) -> None:
        """Compare the record of a tensor in its final place with the layout, and with its bytes if they are read."""
        record = item.written
        if record is None or item.file or item.runs or record.get("name") != step.spec.name:
            raise InvalidMessageError(f"expected a record of {step.spec.name[:80]!r}")
        blobs = messages.convert(record.get("blobs"), list[tuple[str, int, int, str]])
        if [blob[:3] for blob in blobs] != list(places):
            raise InvalidMessageError(f"the record of {step.spec.name[:80]!r} names other places than the layout")
        if read is not None:
            assert self._writer is not None
            if self._writer.writer.record_of(step.spec.name, places, read) != record:
                raise InvalidMessageError(f"the bytes of {step.spec.name[:80]!r} have other digests")

    def _require_part(self, result: TaskResult, item: StepResult, end: int) -> None:
        spec = self._plan.steps[item.number].spec
        if item.written is not None or item.offset != end or item.file != f"{self._name(result)}.bin" * bool(item.file):
            raise InvalidMessageError(f"expected the bytes of {spec.name[:80]!r} in the task's file")
        if bool(item.file) < bool(item.nbytes) or bool(item.file) != bool(item.crc):
            raise InvalidMessageError(f"expected a file and a CRC-32C for {spec.name[:80]!r}")
        lengths = {part.role: part.length for part in spec.parts}
        if any(role not in lengths for role, _ in item.runs):
            raise InvalidMessageError(f"{spec.name[:80]!r} has no such part")
        if result.task.rows is None and not _sizes_fit(spec, [item]):
            raise InvalidMessageError(f"the parts of {spec.name[:80]!r} have other sizes than the plan states")

    def _new_writer(self) -> SharedWriter | None:
        plan = self._plan
        writer = plan.format.writer(_Nowhere(), self._target.name, plan.artifact, plan.options)
        return SharedWriter(writer, [step.spec.name for step in plan.steps]) if isinstance(writer, Skips) else None


def _require_same(result: TaskResult, task: Task, attempt: str) -> None:
    if result.task != task or result.attempt != attempt:
        raise InvalidMessageError("the result is of another task")


def _require_crc(item: StepResult, read: Read) -> None:
    if item.written is None and item.nbytes:
        crc = checksums.hasher("crc32c")
        read_place(read, (item.file, item.offset, item.nbytes), crc.update)
        if not checksums.same(item.crc, crc.text()):
            raise InvalidMessageError("the bytes in the file have another CRC-32C")


def _sizes_fit(spec: TensorSpec, results: Sequence[StepResult]) -> bool:
    """Whether the bytes of each part are as many as the spec states, or at most as many as the part can have."""
    sizes: dict[str, int] = {}
    for role, count in (run for item in results for run in item.runs):
        sizes[role] = sizes.get(role, 0) + count
    return all(
        sizes.get(part.role, 0) <= part.at_most and part.length in (None, sizes.get(part.role, 0))
        for part in spec.parts
    )


def _require_params(step: Step, item: StepResult) -> None:
    if (item.params is None) == is_fitted(step):
        raise InvalidMessageError(f"expected fitted parameters of {step.spec.name[:80]!r} if its encoder fits any")
    try:
        from_json_value(item.params)
    except (ValueError, TypeError) as error:
        raise InvalidMessageError(f"the parameters of {step.spec.name[:80]!r} are damaged: {error}") from error


def _require_digests(item: StepResult, points: Sequence[int]) -> None:
    digests = messages.convert(item.notes.get("digests", {}), dict[str, Digest])
    if not {str(point) for point in points} <= digests.keys():
        raise InvalidMessageError("expected the digests of the values that pass")


class _Nowhere:
    """A target and its files that keep nothing: for a writer that is only asked where things lie."""

    def create(self, name: str) -> _Nowhere:
        return self

    def write_at(self, offset: int, data: Buffer) -> None:
        pass

    def readinto(self, offset: int, out: memoryview) -> None:
        raise AssertionError("nothing was written")

    def truncate(self, size: int) -> None:
        pass

    def close(self) -> None:
        pass
