"""Resources of a run: memory, threads and progress reports, and the chunk sizes that fit in the memory."""

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

# Large enough to hide the time of waking a thread, small enough that several chunks fit in the second-level cache.
CHUNK_ELEMENTS = 1 << 20
MOVE_BYTES = 4 << 20
MOVE_LEAST = 1 << 16
# Memory of a chunk during repacking: several times its input or output.
REPACK_BYTES = 24 << 20


def decompressed(tensor: Tensor) -> int:
    """Return the total number of bytes of a tensor's parts after decompression."""
    return sum(part.nbytes for part in tensor.parts.values())


def whole_cost(tensor: Tensor) -> int:
    """Return the number of bytes of memory that decoding a tensor in one call needs.

    They are its values, its decompressed parts, and one byte per element for checks.
    """
    return tensor.size * (DTYPES[tensor.dtype].bits // 8 + 1) + decompressed(tensor)


def fixed_cost(*tensors: Tensor) -> int:
    """Return the number of bytes of memory that readers of ``tensors`` need regardless of the chunk size.

    Only readers of codecs that cannot stream need them.
    """
    codecs = (CODECS[tensor.codec] for tensor in tensors)
    return sum(0 if codec.streams else whole_cost(item) for codec, item in zip(codecs, tensors, strict=True))


def per_element(*tensors: Tensor) -> float:
    """Return the bytes of memory per element of a chunk of ``tensors``: decoded values and decompressed parts."""
    return sum(DTYPES[item.dtype].bits / 8 + decompressed(item) / max(item.size, 1) for item in tensors)


def by_rows(matrix: tuple[int, int], per_row: float, fixed: int, budget: ChunkBudget, step: int | None) -> ChunkPlan:
    """Return a plan of chunks of rows that fit in ``budget``.

    Parameters
    ----------
    matrix : (rows, columns)
    per_row : float
        Bytes of memory for each row of a chunk.
    fixed : int
        Further bytes for the step, independent of the chunk size.
    budget : ChunkBudget
    step : int or None
        Chunks start at multiples of this number of rows. None for one chunk with all rows.
    """
    rows, cols = matrix
    count = max(rows, 1)
    if step is not None:
        share = int((budget.limit - fixed) // (budget.slots * max(per_row, 1)))
        count = min(CHUNK_ELEMENTS // max(cols, 1), share)
        count = min(max(1, count // step) * step, max(rows, 1))
    return ChunkPlan(rows, cols, count, int(count * per_row) + fixed)


def require_affordable(chunk_plan: ChunkPlan, budget: int, location: str) -> ChunkPlan:
    """Return ``chunk_plan``. Raises ``ResourceError`` ``ram.ceiling`` if a single chunk does not fit in the budget."""
    if chunk_plan.cost > budget:
        raise ResourceError(
            f"expected {format_size(chunk_plan.cost)} of working memory for this tensor, "
            f"found {format_size(max(budget, 0))} in addition to the memory of Python; "
            f"raise --max-ram by {format_size(chunk_plan.cost - budget)} or more",
            rule="ram.ceiling",
            where=location,
        )
    return chunk_plan


# Memory of the process in addition to chunks: thread stacks, overhead of the allocator, the manifest.
RESERVE = 24 << 20
_RESERVE_PER_TENSOR = 4096
_RECYCLED = 128 << 20


@dataclass(frozen=True)
class Resources:
    """The limits of a run's memory and threads.

    Parameters
    ----------
    ram : int or str, optional
        Limit of the process's anonymous memory in bytes, or a text such as ``"2GiB"``.
    threads : int, optional
        Number of encoding threads; by default the number of available processors.
    progress : Progress
        Receives the number of bytes that were read.
    without_ceiling : int, optional
        The largest number of bytes of chunks in flight if ``ram`` is None. A single chunk may exceed it.
    """

    ram: int | str | None = None
    threads: int | None = None
    progress: Progress = field(default_factory=lambda: Progress(0))
    without_ceiling: int | None = None

    @property
    def workers(self) -> int:
        """The number of encoding threads."""
        return self.threads or default_workers()

    def recycled(self, spare: int) -> int:
        """Return the number of bytes of memory to recycle between chunks.

        With a memory limit, it is at most a quarter of ``spare``, the bytes that the largest chunk does not need.
        """
        return _RECYCLED if self.ram is None else max(0, min(_RECYCLED, spare // 4))


def chunk_budget(resources: Resources, steps: Sequence[Step]) -> int:
    """Return the number of bytes for all chunks in flight.

    With a memory limit, it is the limit minus the current use of the process and a reserve. Without a limit, it is a
    quarter of the machine's free memory, at least 256 MiB.
    """
    if resources.ram is None:
        return max(available_ram() // 4, 1 << 28)
    workers = resources.workers
    reserve = RESERVE + _RESERVE_PER_TENSOR * len(steps)
    # Results of fit passes and derived sources of one tensor are in use when those of the next tensor begin.
    reserve += sum(sorted(_retained(step) + _derived_bytes(step) for step in steps)[-2:])
    reserve += workers * max((step.encoder.scratch_bytes() for step in steps if step.encoder is not None), default=0)
    if any(part.encoding != "raw" for step in steps for part in step.spec.parts):
        reserve += (workers + 2) * 3 * encodings.FRAME
    spare = parse_size(resources.ram) - anonymous_in_use() - reserve
    return spare - _require_computing_memory(steps, spare)


def _require_computing_memory(steps: Sequence[Step], spare: int) -> int:
    """Return the largest number of bytes that a derived source of the steps needs while it computes a tensor.

    Raises ``ResourceError`` ``ram.ceiling`` if it exceeds ``spare`` bytes.
    """
    derived = [
        (needed, step, source)
        for step in steps
        for source in _sources(step)
        if isinstance(source, DerivedSource) and (needed := source.computing_bytes())
    ]
    if not derived:
        return 0
    needed, step, source = max(derived, key=lambda item: item[0])
    if needed > spare:
        raise ResourceError(
            f"expected {format_size(needed)} to compute this tensor, found {format_size(max(spare, 0))} in addition "
            f"to the memory of Python; raise --max-ram by {format_size(needed - spare)} or more, or "
            f"{source.memory_hint()}",
            rule="ram.ceiling",
            where=step.tensor.name,
        )
    return needed


def _retained(step: Step) -> int:
    """Return the number of bytes that the results of a step's fit passes occupy until the tensor is written."""
    return 0 if step.encoder is None else step.encoder.retained_bytes()


def _derived_bytes(step: Step) -> int:
    """Return the number of bytes of memory that a step's derived sources need while they are read."""
    return sum(source.working_bytes() for source in _sources(step) if isinstance(source, DerivedSource))


def _sources(step: Step) -> Collection[ByteSource]:
    return {id(part.source): part.source for part in step.tensor.parts.values()}.values()


def choose_chunks(plan: Plan, resources: Resources) -> tuple[list[ChunkPlan], int, int]:
    """Return the chunk plan of each step, the bytes for all chunks in flight, and the bytes of recycled memory.

    Raises ``ResourceError`` ``ram.ceiling`` if a step's smallest chunk does not fit.
    """
    steps = plan.steps
    budget = chunk_budget(resources, steps)
    slots = resources.workers + 3  # chunks that are read, written and used by a fit pass
    share = ChunkBudget(budget, slots, plan.measured)
    chunk_plans = [require_affordable(step.plan_chunks(share), budget, step.tensor.name) for step in steps]
    largest = max((chunk_plan.cost for chunk_plan in chunk_plans), default=0)
    recycled = resources.recycled(budget - largest)
    if resources.ram is not None:
        budget -= recycled
    elif resources.without_ceiling is not None:
        budget = min(budget, max(resources.without_ceiling, largest))
    return chunk_plans, budget, recycled
