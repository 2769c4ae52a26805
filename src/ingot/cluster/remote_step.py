"""A step that a worker executes: the driver waits for its result and copies the bytes from the worker's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ingot.cluster.messages import StepResult
from ingot.cluster.task_runner import TaskRunner
from ingot.core.bytes import checksums
from ingot.engine import resources as cost
from ingot.engine.data import from_json_value
from ingot.engine.hashing import HashFactories
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import IntegrityError
from ingot.model.store import Store
from ingot.model.tensor import Tensor

_CHUNK = 16 << 20


@dataclass(frozen=True)
class RemoteStep(Step):
    """A step of a plan that a worker executes; the driver copies the worker's bytes into the artifact.

    ``local`` is the planned step, and ``number`` its index in the plan. ``runner`` runs its task, and ``store``
    contains the files of the workers.
    """

    local: Step = field(kw_only=True)
    number: int = field(kw_only=True)
    runner: TaskRunner = field(kw_only=True)
    store: Store = field(kw_only=True)

    compress_parts: bool = field(default=False, kw_only=True)

    @property
    def planned(self) -> Step:
        return replace(self.local, spec=self.spec)

    @property
    def in_bytes(self) -> int:
        return self.local.in_bytes

    @property
    def decodes(self) -> Tensor | None:
        return self.local.decodes

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        size = max(cost.MOVE_LEAST, min(_CHUNK, budget.limit // budget.slots))
        return ChunkPlan(self.out_bytes, 1, size, min(size, max(self.out_bytes, 1)))

    def start(self, chunk_plan: ChunkPlan, watches: HashFactories, *, measured: bool) -> StepRun[Any]:
        assert not watches, "the worker hashes the values"
        return _RemoteRun(self, chunk_plan, watches, measured)


def remote_step(step: Step, number: int, runner: TaskRunner, store: Store) -> RemoteStep:
    """Return a step that waits for the worker's result of ``step``; ``number`` is its index in the plan."""
    fields = (step.tensor, step.spec, step.action, step.rule, step.exact)
    return RemoteStep(*fields, local=step, number=number, runner=runner, store=store)


@dataclass
class _RemoteRun(StepRun[RemoteStep]):
    """The run of a remote step in the driver: it waits for the worker and reads the worker's file."""

    _results: list[StepResult] = field(default_factory=list, init=False)

    def fit(self) -> Mapping[str, Any] | None:
        """Wait for the worker, and return the parameters that it fitted."""
        self._results = self.step.runner.results(self.step.number)
        params: Mapping[str, Any] | None = from_json_value(self._results[0].params)
        return params

    @property
    def written(self) -> dict[str, Any] | None:
        return self._results[0].written

    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        """Yield tasks that return chunks of the worker's files, each with 0 as the number of bytes read.

        The runner has already reported the bytes that the worker read.
        """
        for result in self._results:
            if result.nbytes:
                yield from self._read(result, acquire)
            if not acquire():
                return
            yield partial(EncodedChunk, {}, result.error), 0

    def _read(self, result: StepResult, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        source = self.step.store.open(result.file)
        crc = checksums.hasher("crc32c")
        position = result.offset
        try:
            for role, count in result.runs:
                for start in range(0, count, self.chunk_plan.chunk_rows):
                    if not acquire():
                        return
                    data = np.empty(min(self.chunk_plan.chunk_rows, count - start), np.uint8)
                    source.readinto(position, data.data)
                    crc.update(data.data)
                    position += data.nbytes
                    yield partial(EncodedChunk, {role: data}), 0
        finally:
            source.close()
        if not checksums.same(result.crc, crc.text()):
            raise IntegrityError(
                "cluster.part",
                "the bytes that a worker wrote for this tensor have changed since; run again without --resume",
                where=f"{self.step.store.location}: {self.step.tensor.name}",
            )

    def notes(self) -> dict[str, Any]:
        first, *further = [result.notes for result in self._results]
        return {
            key: value + sum(notes[key] for notes in further) if isinstance(value, int | float) else value
            for key, value in first.items()
        }
