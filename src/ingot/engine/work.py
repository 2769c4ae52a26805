"""A step, the step in progress, and the objects that the threads of the pipeline hand to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from ingot.codecs.base import BaseEncoder, Encoder
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.watch import Feed, Watches
from ingot.errors import CodecError
from ingot.formats.base import Format, WriteOptions, knows_size
from ingot.model.artifact import NO_ATTACHMENTS, Artifact, Attachments
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor


def same_storage(tensor: Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor is stored already just as the spec says, so that its parts can move."""
    if (
        tensor.codec != spec.codec
        or tensor.dtype != spec.dtype
        or set(tensor.parts) != {part.role for part in spec.parts}
    ):
        return False
    if any(dict(tensor.params).get(key) != value for key, value in spec.params.items()):
        return False
    return all(
        part.encoding == tensor.parts[part.role].encoding
        and part.dtype == tensor.parts[part.role].dtype
        and part.nbytes in (None, tensor.parts[part.role].nbytes)
        for part in spec.parts
    )


def least_size(specs: Iterable[TensorSpec], size: int) -> int:
    """Return ``size``, a format's upper bound for these specs, less the parts whose length only their bytes tell."""
    return max(0, size - sum(part.at_most for spec in specs for part in spec.parts if part.length is None))


def encoded_spec(name: str, tensor: Tensor, encoder: Encoder | DeltaEncoder, encoding: str) -> TensorSpec:
    """Return the spec of a tensor that ``encoder`` will write, each part in ``encoding``."""
    parts = encoder.parts
    if encoding != "raw":
        if any(part.length is None for part in parts):
            raise CodecError(
                "convert.encoding",
                f"encoding {encoding} needs a codec whose part sizes are known beforehand, {encoder.codec}'s are not",
            )
        parts = tuple(replace(part, length=None, encoding=encoding, uncompressed_length=part.length) for part in parts)
    dtype = str(encoder.params.get("dtype", "")) or _stored_dtype(parts, tensor.dtype)
    return TensorSpec(name, tensor.shape, dtype, encoder.codec, parts, dict(encoder.params))


def difference_spec(tensor: Tensor, codec: DeltaCodec, encoder: DeltaEncoder, encoding: str) -> TensorSpec:
    """Return the spec of the difference that ``encoder`` of ``codec`` will write, of which ``tensor`` is the result."""
    return encoded_spec(tensor.name, replace(tensor, dtype=tensor.dtype if codec.exact else "f32"), encoder, encoding)


def _stored_dtype(parts: Sequence[PartSpec], default: str) -> str:
    return (parts[0].type or parts[0].dtype) if len(parts) == 1 else default


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


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is written: its spec with what was learnt, bytes, sums of its error, what its chunks told."""

    step: Step
    nbytes: int
    error: ErrorStats
    notes: Mapping[str, Any]

    def digest(self, point: int) -> str | None:
        """Return the hex of the values that passed at ``point``; None where they were not hashed."""
        found: Mapping[str, str] = self.notes.get("digests", {})
        return found.get(str(point))


@dataclass(frozen=True)
class Plan:
    """All steps in output order, and what else determines the bytes of the weight files.

    Parameters
    ----------
    steps : sequence of Step
    format : Format
    metadata : mapping
        As the format carries it.
    options : WriteOptions
    measured : bool
        Whether the error of what is not exact is measured while it is written.
    attachments, config
        As of ``Artifact``.
    """

    steps: Sequence[Step]
    format: Format
    metadata: Mapping[str, Any]
    options: WriteOptions
    measured: bool = True
    attachments: Attachments = NO_ATTACHMENTS
    config: bytes | None = None

    @cached_property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors to write, in order."""
        return [step.spec for step in self.steps]

    @property
    def artifact(self) -> Artifact:
        """What is written, as far as it is known before."""
        before = {} if self.config is None else {step.spec.name: step.tensor for step in self.steps}
        return Artifact(self.specs, self.metadata, self.attachments, self.config, before)

    @property
    def in_bytes(self) -> int:
        """Stored bytes that are read."""
        return sum(step.in_bytes for step in self.steps)

    @cached_property
    def size(self) -> int:
        """Bytes of the weight files, headers and padding included.

        Where ``size_exact`` is False (zstd, sparse, parts that may be equal in a format that stores such once) it is an
        upper bound: nothing shrinks, no value is zero, no two parts are equal.
        """
        return self.format.size(self.artifact, self.options)

    @property
    def size_exact(self) -> bool:
        """Whether ``size`` is what is written, to the byte."""
        return knows_size(self.format, self.specs)

    @property
    def least(self) -> int:
        """The bytes that the weight files take if no two parts are equal, less what only the bytes themselves tell."""
        return least_size(self.specs, self.size)
