"""Checks of workers' results in the driver, because a faulty worker may not notice its errors."""

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
from ingot.cluster.run_task import SharedWriter, has_fixed_offset, is_fitted
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
    """A check of task results against the plan, the layout of the files, and the bytes that workers wrote.

    Parameters
    ----------
    plan : Plan
        The plan of all steps.
    target : Target
    hashed : sequence
        The points of each step at which values are hashed.
    folder : SharedFolder
        The folder into which workers write files, with names that begin with ``key``.
    shared : bool
        Whether workers write tensors at their final offsets, in ``target.staging``.
    in_full : bool
        Whether workers write full files of the result.
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
        self._blob_locations: dict[Task, list[list[BlobLocation]]] = {}

    def prepare(self, task: Task) -> None:
        """Compute the final offsets of a task's tensors, which ``check`` compares with the result.

        Calls are fastest in the order of the tasks' steps.
        """
        if task in self._blob_locations or task.rows is not None or not self._is_placed:
            return
        if self._writer is None or self._writer.position > task.start:
            self._writer = self._new_writer()
        if self._writer is None:
            self._is_placed = False
            return
        locations: list[list[BlobLocation]] = []
        for index in range(task.start, task.stop):
            self._writer.skip_to(index)
            step = self._plan.steps[index]
            locations.append(self._writer.writer.locate(step.spec.name) if has_fixed_offset(step) else [])
        self._blob_locations[task] = locations

    def forget(self, task: Task) -> None:
        """Release the offsets that ``prepare`` computed for a task."""
        self._blob_locations.pop(task, None)

    def check(self, result: TaskResult, task: Task, attempt: str, *, parts: bool, placed: bool) -> None:
        """Raise ``WorkerLostError`` if the result of a task is not valid.

        If ``parts`` is true, the bytes in the worker's file are read and checked too. If ``placed`` is true, the bytes
        at final offsets are.
        """
        try:
            _require_same_task(result, task, attempt)
            self._require_files(result)
            with OpenFiles(self._files or self._folder.store) as files:
                self._require_steps(result, files.read if placed and self._files and not task.files else None)
            with OpenFiles(self._folder.store) as files:
                for item in result.steps if parts else ():
                    _require_crc(item, files.read)
        except (InvalidMessageError, IngotError) as error:
            raise WorkerLostError(f"worker {result.worker[:200]} returned a wrong result: {error}") from error

    def fits(self, index: int, results: Sequence[StepResult]) -> bool:
        """Return whether ``results`` have the planned number of bytes of each part of step ``index``.

        ``results`` is the result of the step, or the results of all ranges of its rows.
        """
        if any(item.written is not None for item in results):
            return len(results) == 1
        return _sizes_fit(self._plan.steps[index].spec, results)

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
        for item, locations in zip(result.steps, self._locations_of(task), strict=True):
            step = self._plan.steps[item.number]
            if locations is not None:
                self._require_record(step, item, locations, read)
            else:
                self._require_part(result, item, end)
                end += item.nbytes
            _require_params(step, item)
            if task.rows is None:
                _require_digests(item, self._hashed[item.number])
        if not task.files and end and result.states != [str(end)] and not result.states[0].startswith(f"{end} "):
            raise InvalidMessageError(f"expected {end} bytes in the file")

    def _locations_of(self, task: Task) -> Iterator[list[BlobLocation] | None]:
        """Yield the final locations of each step of a task; None for a step whose bytes are in the worker's file."""
        locations = self._blob_locations.get(task)
        for offset, index in enumerate(range(task.start, task.stop)):
            if locations is not None and has_fixed_offset(self._plan.steps[index]):
                yield locations[offset]
            else:
                yield None

    def _require_record(
        self, step: Step, item: StepResult, locations: Sequence[BlobLocation], read: Read | None
    ) -> None:
        """Raise ``InvalidMessageError`` unless the record of a tensor at its final offset has the planned offsets.

        If ``read`` is given, the digests in the record are compared with the bytes that it reads.
        """
        record = item.written
        if record is None or item.file or item.runs or record.get("name") != step.spec.name:
            raise InvalidMessageError(f"expected a record of {step.spec.name[:80]!r}")
        blobs = messages.convert(record.get("blobs"), list[tuple[str, int, int, str]])
        if [blob[:3] for blob in blobs] != list(locations):
            raise InvalidMessageError(f"the record of {step.spec.name[:80]!r} has other offsets than the layout")
        if read is not None:
            assert self._writer is not None
            if self._writer.writer.record_of(step.spec.name, locations, read) != record:
                raise InvalidMessageError(f"the bytes of {step.spec.name[:80]!r} have other digests")

    def _require_part(self, result: TaskResult, item: StepResult, end: int) -> None:
        """Raise ``InvalidMessageError`` unless a step's bytes begin at ``end`` of the worker's file and fit the plan.

        ``end`` is the end of the bytes of the steps before it.
        """
        spec = self._plan.steps[item.number].spec
        if item.written is not None or item.offset != end or item.file != f"{self._name(result)}.bin" * bool(item.file):
            raise InvalidMessageError(f"expected the bytes of {spec.name[:80]!r} in the task's file")
        if bool(item.file) < bool(item.nbytes) or bool(item.file) != bool(item.crc):
            raise InvalidMessageError(f"expected a file and a CRC-32C for {spec.name[:80]!r}")
        lengths = {part.role: part.length for part in spec.parts}
        if any(role not in lengths for role, _ in item.runs):
            raise InvalidMessageError(f"{spec.name[:80]!r} has no such part")
        if result.task.rows is None and not _sizes_fit(spec, [item]):
            raise InvalidMessageError(f"the parts of {spec.name[:80]!r} have other sizes than in the plan")

    def _new_writer(self) -> SharedWriter | None:
        plan = self._plan
        writer = plan.format.writer(_NullTarget(), self._target.name, plan.artifact, plan.options)
        return SharedWriter(writer, [step.spec.name for step in plan.steps]) if isinstance(writer, Skips) else None


def _require_same_task(result: TaskResult, task: Task, attempt: str) -> None:
    if result.task != task or result.attempt != attempt:
        raise InvalidMessageError("the result belongs to another task")


def _require_crc(item: StepResult, read: Read) -> None:
    if item.written is None and item.nbytes:
        crc = checksums.hasher("crc32c")
        read_place(read, (item.file, item.offset, item.nbytes), crc.update)
        if not checksums.same(item.crc, crc.text()):
            raise InvalidMessageError("the bytes in the file have another CRC-32C")


def _sizes_fit(spec: TensorSpec, results: Sequence[StepResult]) -> bool:
    """Return whether each part in ``results`` has the number of bytes in the spec.

    If the spec has no length for a part, its upper bound applies.
    """
    sizes: dict[str, int] = {}
    for role, count in (run for item in results for run in item.runs):
        sizes[role] = sizes.get(role, 0) + count
    return all(
        sizes.get(part.role, 0) <= part.at_most and part.length in (None, sizes.get(part.role, 0))
        for part in spec.parts
    )


def _require_params(step: Step, item: StepResult) -> None:
    if (item.params is None) == is_fitted(step):
        raise InvalidMessageError(f"{step.spec.name[:80]!r} has fitted parameters but must not, or lacks them")
    try:
        from_json_value(item.params)
    except (ValueError, TypeError) as error:
        raise InvalidMessageError(f"the parameters of {step.spec.name[:80]!r} are damaged: {error}") from error


def _require_digests(item: StepResult, points: Sequence[int]) -> None:
    digests = messages.convert(item.notes.get("digests", {}), dict[str, Digest])
    if not {str(point) for point in points} <= digests.keys():
        raise InvalidMessageError("the digests of hashed values are missing")


class _NullTarget:
    """A target and its only file, which discard all bytes.

    A writer uses it to compute the offsets of tensors without writing a file.
    """

    def create(self, name: str) -> _NullTarget:
        return self

    def write_at(self, offset: int, data: Buffer) -> None:
        pass

    def readinto(self, offset: int, out: memoryview) -> None:
        raise AssertionError("nothing was written")

    def truncate(self, size: int) -> None:
        pass

    def close(self) -> None:
        pass
