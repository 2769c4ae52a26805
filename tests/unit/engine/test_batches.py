"""What the pipeline hands from thread to thread together: small tensors, in order, whatever becomes of one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from ingot.engine.pipeline import Begin, Chunk, End, Pipeline
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import CodecError
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor


class _Counting(StepRun["Counted"]):
    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        for index in range(self.step.chunks):
            if not acquire():
                return
            yield partial(self.step.make, index), 1


@dataclass(frozen=True)
class Counted(Step):
    """A step of so many chunks, of which one may fail; each says who made it."""

    number: int = field(kw_only=True)
    chunks: int = field(default=1, kw_only=True)
    cost: int = field(default=1, kw_only=True)
    fails_at: int | None = field(default=None, kw_only=True)

    def make(self, index: int) -> EncodedChunk:
        if index == self.fails_at:
            raise CodecError("test.fails", f"chunk {index} of {self.number}")
        return EncodedChunk({"by": (self.number, index, threading.get_ident())})

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        return ChunkPlan(self.chunks, 1, 1, self.cost)

    def start(self, chunk_plan: ChunkPlan, watches: Any, *, measured: bool) -> StepRun[Any]:
        return _Counting(self, chunk_plan, watches, measured)


def counted(number: int, **how: Any) -> Counted:
    spec = TensorSpec(f"t{number}", (1,), "f32", "dense", ())
    tensor = Tensor(spec.name, spec.shape, spec.dtype, "dense", {}, {})
    return Counted(tensor, spec, "moved", "test", number=number, **how)


def run(steps: Sequence[Counted], budget: int = 1 << 20) -> list[tuple[int, int, int]]:
    """Return who made each chunk, in the order in which they came; checks that each lies within its step."""
    found: list[tuple[int, int, int]] = []
    now: Step | None = None
    chunk_plans = [step.plan_chunks(ChunkBudget(budget, 4)) for step in steps]
    with Pipeline(steps, chunk_plans, workers=2, budget=budget, measured=False) as pipeline:
        for event in pipeline.events():
            if isinstance(event, Begin):
                assert now is None
                now = event.step
            elif isinstance(event, Chunk):
                made = event.result().parts["by"]
                assert isinstance(now, Counted)
                assert made[0] == now.number
                found.append(made)
                pipeline.release(event)
            elif isinstance(event, End):
                now = None
    assert now is None
    return found


def test_many_small_tensors_come_in_order() -> None:
    steps = [counted(number, chunks=number % 4) for number in range(1000)]
    found = run(steps)
    assert threading.get_ident() not in {made[2] for made in found}
    assert [made[:2] for made in found] == [(step.number, index) for step in steps for index in range(step.chunks)]


def test_small_tensors_wait_for_no_room_that_they_hold_themselves() -> None:
    """Two chunks fit: a batch that waits for the third must be handed on first."""
    assert len(run([counted(number, cost=100) for number in range(50)], budget=200)) == 50


def test_a_large_chunk_is_a_batch_of_its_own() -> None:
    """So two threads work beside each other on large tensors, as a barrier of two in their works shows."""
    barrier = threading.Barrier(2)

    @dataclass(frozen=True)
    class Meeting(Counted):
        def make(self, index: int) -> EncodedChunk:
            barrier.wait(30)
            return super().make(index)

    steps = [Meeting(**{**vars(counted(number, cost=1 << 20)), "action": "moved"}) for number in range(4)]
    found = run(steps, budget=8 << 20)
    assert len({made[2] for made in found}) == 2


@pytest.mark.parametrize("failing", [0, 7, 99])
def test_what_came_before_a_failure_is_handed_on(failing: int) -> None:
    seen: list[int] = []
    steps = [counted(number, fails_at=0 if number == failing else None) for number in range(100)]
    chunk_plans = [step.plan_chunks(ChunkBudget(1 << 20, 4)) for step in steps]

    def read() -> None:
        with Pipeline(steps, chunk_plans, workers=2, budget=1 << 20, measured=False) as pipeline:
            seen.extend(event.result().parts["by"][0] for event in pipeline.events() if isinstance(event, Chunk))

    with pytest.raises(CodecError, match=f"chunk 0 of {failing} "):
        read()
    assert seen == list(range(failing))


def test_what_is_taken_is_let_go() -> None:
    """A batch holds no results of chunks that were written."""
    steps = [counted(number) for number in range(3)]
    chunk_plans = [step.plan_chunks(ChunkBudget(1 << 20, 4)) for step in steps]
    with Pipeline(steps, chunk_plans, workers=1, budget=1 << 20, measured=False) as pipeline:
        chunks = [event for event in pipeline.events() if isinstance(event, Chunk)]
        assert np.array_equal([chunk.result().parts["by"][0] for chunk in chunks], [0, 1, 2])
        with pytest.raises(RuntimeError, match="taken before"):
            chunks[0].result()
