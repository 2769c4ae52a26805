"""A step, the step in progress, and the objects that the threads of the pipeline hand to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ingot.codecs.base import BaseEncoder
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.watch import Feed, Watches
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The result of one chunk. The writing thread calls ``commit``, chunk after chunk in order."""

    parts: Mapping[str, Any]
    error: ErrorStats | None = None
    commit: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a tensor is cut into chunks: ``rows`` of ``cols`` elements, ``chunk_rows`` at a time, ``cost`` bytes each.

    A step that several workers share begins at row ``first`` and ends before row ``last``.
    """

    rows: int
    cols: int
    chunk_rows: int
    cost: int
    first: int = 0
    last: int | None = None

    @property
    def end(self) -> int:
        """The row to end before."""
        return self.rows if self.last is None else self.last


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """The memory for a step's chunks: ``limit`` bytes, in which ``slots`` of them should fit.

    ``measured`` is set if the error of inexact chunks is measured, which takes memory too.
    """

    limit: int
    slots: int
    measured: bool = False


ChunkTask = Callable[[], EncodedChunk]
"""Encodes a chunk, in a thread of the pool."""

AcquireBudget = Callable[[], bool]
"""Waits for the memory of a chunk; returns False if the run was stopped."""


@dataclass(frozen=True)
class Step(ABC):
    """The processing of one tensor. Subclasses define ``plan_chunks`` and ``start``.

    Parameters
    ----------
    tensor : Tensor
        The tensor to read; if there are several, the one that the result resembles.
    spec : TensorSpec
        The tensor to write.
    action : str
        ``moved`` (stored bytes are copied), ``repacked`` (the same integers in another layout), ``decoded`` (a stored
        codec becomes dense values) or ``encoded``.
    rule : str
        The rule that chose the step.
    exact : bool
        Whether every value survives.
    encoder : optional
        The encoder that this process uses; None if there is nothing to encode here.
    compress_parts : bool
        Whether the bytes of chunks are compressed, as ``spec`` states, when they are written.
    """

    tensor: Tensor
    spec: TensorSpec
    action: str
    rule: str
    exact: bool = True
    encoder: BaseEncoder | None = field(default=None, kw_only=True)
    compress_parts: bool = field(default=True, kw_only=True)

    @property
    def planned(self) -> Step:
        """The step of the plan: the step itself, or the one that this step only collects from a worker."""
        return self

    @property
    def in_bytes(self) -> int:
        """The number of stored bytes to read."""
        return self.tensor.nbytes

    @property
    def out_bytes(self) -> int:
        """The number of bytes to store; an upper bound if it depends on the values."""
        return sum(part.at_most for part in self.spec.parts)

    @property
    def decodes(self) -> Tensor | None:
        """The tensor whose values are decoded, if there is one."""
        return self.tensor

    def row_ranges(self, hashed: Collection[int] = ()) -> tuple[int, int] | None:
        """Return the number of rows, and the unit at whose multiples workers may share them; None if they may not.

        ``hashed`` are points at which the digest of the full tensor is required, if this process does the step.
        """
        return None

    @abstractmethod
    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        """Choose chunks that fit in ``budget``, or the smallest possible ones."""

    @abstractmethod
    def start(self, chunk_plan: ChunkPlan, watches: Watches, *, measured: bool) -> StepRun[Any]:
        """Return the step in progress; ``watches`` hash the values."""


S = TypeVar("S", bound=Step)


@dataclass
class StepRun(ABC, Generic[S]):
    """A step in progress: its state from the first byte that is read to the last byte that is written.

    ``measured`` is set if the error of inexact chunks is measured.
    """

    step: S
    chunk_plan: ChunkPlan
    watches: Watches
    measured: bool = False
    feeds: dict[int, Feed] = field(default_factory=dict, init=False)

    def fit(self) -> Mapping[str, Any] | None:
        """Make the passes that come before encoding; return the parameters that they determine."""
        return None

    @property
    def written(self) -> dict[str, Any] | None:
        """The writer's record of a tensor that a worker has written into the result; valid after ``fit``."""
        return None

    @abstractmethod
    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        """Read chunk after chunk in the calling thread; yield the task of each and the number of bytes read for it.

        ``acquire`` is called before each chunk is read.
        """

    def notes(self) -> dict[str, Any]:
        """Return JSON values that the chunks determined: digests by point, and numbers.

        If several workers share a step, their numbers are added.
        """
        return {"digests": {str(point): feed.hex for point, feed in self.feeds.items() if feed.own}}
