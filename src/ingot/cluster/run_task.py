"""Run a task in a worker. Its steps write their bytes at the final offsets, or into a file that the driver copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ingot.cluster.messages import StepResult, Task
from ingot.core.bytes import checksums
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.data import to_json_value
from ingot.engine.hashing import HashFactories, HashThread, TensorHashes
from ingot.engine.pipeline import Begin, End, HashSelector, Pipeline, Sink, TensorSink, write_chunks
from ingot.engine.resources import Resources, choose_chunks
from ingot.engine.steps import Encode
from ingot.engine.work import Plan, Step
from ingot.formats.by_many import Skips
from ingot.model import bytesource
from ingot.model.bytesource import Buffer
from ingot.model.reading.limits import require_in_proportion
from ingot.model.spec import TensorSpec

Job = TypeVar("Job")
Opened = TypeVar("Opened")


class OpenJob(Generic[Job, Opened]):
    """A cache of the open files of the last job, so that they stay open between its tasks.

    ``enter`` is a function that opens the files of a job.
    """

    def __init__(self, enter: Callable[[Job], AbstractContextManager[Opened]]) -> None:
        self._enter = enter
        self._stack = ExitStack()
        self._last: tuple[Job, Opened] | None = None

    def opened(self, job: Job) -> Opened:
        """Return the open files of ``job``. If another job's files are open, they are closed first."""
        if self._last is None or self._last[0] != job:
            self.close()
            self._last = job, self._stack.enter_context(self._enter(job))
        return self._last[1]

    def close(self) -> None:
        """Close the files of the last job."""
        self._last = None
        self._stack.close()


def is_fitted(step: Step) -> bool:
    """Return whether a step has fit passes.

    Fit passes read the tensor before it is encoded, and determine parameters that the plan's spec lacks.
    """
    return isinstance(step, Encode) and step.encoder.fit_passes > 0


def has_fixed_offset(step: Step) -> bool:
    """Return whether the plan alone determines the offset of a step's result and its entry in the header."""
    return step.spec.nbytes is not None and not is_fitted(step)


class SharedWriter:
    """A writer for all tensors of a plan, used by a process that writes only some of them.

    ``names`` are the tensors of all steps in order; ``position`` is the index of the next.
    """

    def __init__(self, writer: Skips, names: Sequence[str]) -> None:
        self.writer = writer
        self.names = names
        self.position = 0

    def skip_to(self, index: int) -> None:
        """Skip all tensors before ``index``; raise ``ValueError`` if the writer is already past it."""
        if index < self.position:
            raise ValueError(f"the writer is at {self.position}, past {index}")
        for name in self.names[self.position : index]:
            self.writer.skip(name)
        self.position = index


class PrefixedTarget:
    """A target that creates files in another target, with a prefix before their names."""

    def __init__(self, target: bytesource.Target, prefix: str) -> None:
        self._target = target
        self._prefix = prefix

    def create(self, name: str) -> bytesource.Sink:
        """Open the file ``name``, with the prefix before it, for writing."""
        return self._target.create(self._prefix + name)


class PartsFile:
    """A file with the stored bytes of tensors, one after the other. It is created at the first write."""

    def __init__(self, target: bytesource.Target, name: str) -> None:
        self._target = target
        self.name = name
        self._sink: bytesource.Sink | None = None
        self._end = self._offset = 0
        self._runs: list[tuple[str, int]] = []
        self._crc = checksums.hasher("crc32c")

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written; the file then does not exist."""
        return self._sink is None

    def begin(self, spec: TensorSpec) -> None:
        """Start a tensor; its parts may follow in any order."""
        self._offset = self._end
        self._runs = []
        self._crc = checksums.hasher("crc32c")

    def write(self, role: str, data: Buffer) -> None:
        """Append the next bytes of the part ``role``."""
        if self._sink is None:
            self._sink = self._target.create(self.name)
        view = memoryview(data).cast("B")
        self._sink.write_at(self._end, view)
        self._crc.update(view)
        before = self._runs.pop()[1] if self._runs and self._runs[-1][0] == role else 0
        self._runs.append((role, before + view.nbytes))
        self._end += view.nbytes

    def end(self) -> dict[str, Any]:
        """End the tensor; return file, offset, runs and CRC of its bytes, as ``StepResult`` has them."""
        return {"file": self.name, "offset": self._offset, "runs": self._runs, "crc": self._crc.text()}

    def close(self) -> None:
        """Close the file, if it was created."""
        if self._sink is not None:
            self._sink.close()


def _watching(lane: HashThread, hashed: Sequence[Sequence[int]]) -> HashSelector:
    """Return a hash selector: a function that returns the hash factories of the next step.

    ``hashed`` are the points of each step; the function must be called once per step, in the order of the steps.
    """
    watch = TensorHashes(lane)
    points_by_step = iter(hashed)

    def watches_of(step: Step) -> HashFactories:
        return dict.fromkeys(next(points_by_step), watch)

    return watches_of


def run_task(
    plan: Plan,
    task: Task,
    parts: PartsFile,
    placed: SharedWriter | None,
    resources: Resources,
    hashed: Sequence[Sequence[int]],
) -> list[StepResult]:
    """Run a task and return a result for each of its steps.

    ``plan`` contains only the steps of the task; ``resources`` are those of this worker. If ``placed`` is given,
    tensors with a fixed offset (``has_fixed_offset``) are written to it. All other tensors, and ranges of rows, are
    written to ``parts``. ``hashed`` are the points of each step at which values are hashed. Values of a range of rows
    are not hashed.

    Raises ``CodecError``, ``FormatError``, ``IntegrityError``, ``ResourceError``, ``MissingExtraError``.
    """
    require_in_proportion([tensor for step in plan.steps if (tensor := step.decodes) is not None], "")
    chunk_plans, budget, recycled = choose_chunks(plan, resources)
    if task.rows is not None:
        chunk_plans = [replace(chunk_plans[0], first=task.rows[0], last=task.rows[1])]
        hashed = [()]
    results: list[StepResult] = []
    with (
        HashThread("values") as lane,
        Pipeline(
            plan.steps,
            chunk_plans,
            workers=resources.workers,
            budget=budget,
            measured=plan.measured,
            recycled=recycled,
            hash_selector=_watching(lane, hashed),
        ) as pipeline,
    ):

        def open_sink(event: Begin) -> Sink:
            step = event.step
            pending = resources.workers + 2
            writer: Any = parts
            if placed is not None and task.rows is None and has_fixed_offset(step):
                placed.skip_to(task.start + len(results))
                writer = placed.writer
            return TensorSink(writer, step.spec, compress=step.compress_parts, pool=pipeline.pool, pending=pending)

        def add_result(event: End, record: dict[str, Any], error: ErrorStats) -> None:
            index = task.start + len(results)
            notes = event.running.notes()
            if "runs" in record:
                params = to_json_value(event.step.spec.params) if is_fitted(event.step) else None
                results.append(StepResult(index, error, notes, params, **record))
            else:
                assert placed is not None
                placed.position = index + 1
                results.append(StepResult(index, error, notes, written=record))
            if event.step.encoder is not None:
                event.step.encoder.forget()

        write_chunks(pipeline, open_sink, add_result, lambda count, item: None)
    parts.close()
    return results
