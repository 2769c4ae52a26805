"""What reading and making chunks takes, and how many rows of a tensor fit into one."""

from __future__ import annotations

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.memory import format_size
from ingot.engine.work import ChunkBudget, ChunkPlan
from ingot.errors import ResourceError
from ingot.model.tensor import Tensor

# Large enough to hide a thread's wake-up, small enough that a few fit in the second-level cache's reach.
CHUNK_ELEMENTS = 1 << 20
MOVE_BYTES, MOVE_LEAST = 4 << 20, 1 << 16
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
    fixed : bytes that the step takes beside
    step : chunks begin at multiples of so many rows; None for all rows in one
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
