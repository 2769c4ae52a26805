"""What a run may take: memory, threads; and who is told how far it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ingot.codecs.table import CODECS
from ingot.core.bytes import encodings
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.memory import anonymous_in_use, available_ram, format_size, parse_size
from ingot.core.runtime.parallel import default_workers
from ingot.core.runtime.progress import Progress
from ingot.engine.work import ChunkBudget, ChunkPlan, Plan, Step
from ingot.errors import ResourceError
from ingot.model.bytesource import ByteSource, DerivedSource
from ingot.model.tensor import Tensor

# Large enough to hide a thread's wake-up, small enough that a few fit in the second-level cache's reach.
CHUNK_ELEMENTS = 1 << 20
MOVE_BYTES = 4 << 20
MOVE_LEAST = 1 << 16
# Of all that a chunk takes on its way to another layout: several times what is read or written.
REPACK_BYTES = 24 << 20


def decompressed(tensor: Tensor) -> int:
    """Return the bytes of all parts, their encoding undone."""
    return sum(part.nbytes for part in tensor.parts.values())


def whole_cost(tensor: Tensor) -> int:
    """Bytes that a reader takes that cannot stream: all values, all parts, and a byte per element to find doubles."""
    return tensor.size * (DTYPES[tensor.dtype].bits // 8 + 1) + decompressed(tensor)


def fixed_cost(*tensors: Tensor) -> int:
    """Bytes that readers take which cannot stream."""
    found = (CODECS[tensor.codec] for tensor in tensors)
    return sum(0 if codec.streams else whole_cost(item) for codec, item in zip(found, tensors, strict=True))


def per_element(*tensors: Tensor) -> float:
    """Bytes per element that reading chunks of these tensors takes: the values, and what is stored of them."""
    return sum(DTYPES[item.dtype].bits / 8 + decompressed(item) / max(item.size, 1) for item in tensors)


def by_rows(matrix: tuple[int, int], per_row: float, fixed: int, budget: ChunkBudget, step: int | None) -> ChunkPlan:
    """Cut rows so that chunks fit into ``budget``.

    Parameters
    ----------
    matrix : rows and columns
    per_row : bytes that a row of a chunk takes
    fixed : further bytes of the step, independent of the chunk
    step : number of rows at whose multiples chunks begin; None for all rows in one chunk
    """
    rows, cols = matrix
    count = max(rows, 1)
    if step is not None:
        share = int((budget.limit - fixed) // (budget.slots * max(per_row, 1)))
        count = min(CHUNK_ELEMENTS // max(cols, 1), share)
        count = min(max(1, count // step) * step, max(rows, 1))
    return ChunkPlan(rows, cols, count, int(count * per_row) + fixed)


def affordable(chunk_plan: ChunkPlan, budget: int, where: str) -> ChunkPlan:
    """Return ``chunk_plan``; raises ``ResourceError`` ``ram.ceiling`` where not even one chunk fits."""
    if chunk_plan.cost > budget:
        raise ResourceError(
            f"expected {format_size(chunk_plan.cost)} of working memory for this tensor, "
            f"found {format_size(max(budget, 0))} beside what Python itself takes; "
            f"raise --max-ram by {format_size(chunk_plan.cost - budget)} or more",
            rule="ram.ceiling",
            where=where,
        )
    return chunk_plan


# What the process takes beside chunks: thread stacks, allocator slack, the manifest being built.
RESERVE = 24 << 20
_RESERVE_PER_TENSOR = 4096
_RECYCLED = 128 << 20


@dataclass(frozen=True)
class Resources:
    """How much a run may take.

    Parameters
    ----------
    ram : int or str, optional
        Ceiling of the process's anonymous memory in bytes, or text such as ``"2GiB"``.
    threads : int, optional
        Threads that encode; all processors this process may use by default.
    progress : Progress
        Told the bytes that were read.
    without_ceiling : int, optional
        Bytes that chunks in flight take where there is no ceiling, though more is free: so many or a single one.
    """

    ram: int | str | None = None
    threads: int | None = None
    progress: Progress = field(default_factory=lambda: Progress(0))
    without_ceiling: int | None = None

    @property
    def workers(self) -> int:
        """Threads that encode."""
        return self.threads or default_workers()

    def recycled(self, spare: int) -> int:
        """Return the bytes of chunks that may be kept for the next ones; under a ceiling a share of what is spare."""
        return _RECYCLED if self.ram is None else max(0, min(_RECYCLED, spare // 4))


def chunk_budget(resources: Resources, steps: Sequence[Step]) -> int:
    """Return the bytes for chunks: the ceiling less what the process has now and a reserve.

    Without a ceiling, return a quarter of the memory that the machine has left, and at least 256 MiB.
    """
    if resources.ram is None:
        return max(available_ram() // 4, 1 << 28)
    workers = resources.workers
    reserve = RESERVE + _RESERVE_PER_TENSOR * len(steps)
    # The results of one tensor's fit passes are still in use while the next one's begin; so are sources of its bytes.
    reserve += sum(sorted(_retained(step) + _made(step) for step in steps)[-2:])
    reserve += workers * max((step.encoder.scratch_bytes() for step in steps if step.encoder is not None), default=0)
    if any(part.encoding != "raw" for step in steps for part in step.spec.parts):
        reserve += (workers + 2) * 3 * encodings.FRAME
    spare = parse_size(resources.ram) - anonymous_in_use() - reserve
    return spare - _require_room_to_make(steps, spare)


def _require_room_to_make(steps: Sequence[Step], spare: int) -> int:
    """Return the memory that tensors take that are computed when they are read; ``ResourceError`` ``ram.ceiling``."""
    found = [
        (most, step, source)
        for step in steps
        for source in _sources(step)
        if isinstance(source, DerivedSource) and (most := source.computing_bytes())
    ]
    if not found:
        return 0
    most, step, source = max(found, key=lambda each: each[0])
    if most > spare:
        raise ResourceError(
            f"expected {format_size(most)} to compute this tensor, found {format_size(max(spare, 0))} beside what "
            f"Python itself takes; raise --max-ram by {format_size(most - spare)} or more, or {source.memory_hint()}",
            rule="ram.ceiling",
            where=step.tensor.name,
        )
    return most


def _retained(step: Step) -> int:
    """Return the memory that a step's encoder keeps from its fit passes until the tensor is written."""
    return 0 if step.encoder is None else step.encoder.retained_bytes()


def _made(step: Step) -> int:
    """Return the memory of sources that make a tensor's bytes as they are read."""
    return sum(source.working_bytes() for source in _sources(step) if isinstance(source, DerivedSource))


def _sources(step: Step) -> Collection[ByteSource]:
    return {id(part.source): part.source for part in step.tensor.parts.values()}.values()


def cut(plan: Plan, resources: Resources) -> tuple[list[ChunkPlan], int, int]:
    """Choose each step's chunks; return them, the bytes for all chunks in flight, and those that are kept when done.

    Raises ``ResourceError`` ``ram.ceiling`` where a step's smallest chunk does not fit.
    """
    steps = plan.steps
    budget = chunk_budget(resources, steps)
    slots = resources.workers + 3  # one being read, one being written, one of a fit pass
    share = ChunkBudget(budget, slots, plan.measured)
    chunk_plans = [affordable(step.plan_chunks(share), budget, step.tensor.name) for step in steps]
    largest = max((chunk_plan.cost for chunk_plan in chunk_plans), default=0)
    recycled = resources.recycled(budget - largest)
    if resources.ram is not None:
        budget -= recycled
    elif resources.without_ceiling is not None:
        budget = min(budget, max(resources.without_ceiling, largest))
    return chunk_plans, budget, recycled
