"""Steps, steps in progress, and the objects that pass between the threads of the pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from ingot.codecs.base import BaseEncoder, Encoder
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.hashing import HashFactories, HashStream
from ingot.errors import CodecError
from ingot.formats.base import Format, WriteOptions, knows_size
from ingot.model.artifact import NO_ATTACHMENTS, Artifact, Attachments
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor


def same_storage(tensor: Tensor, spec: TensorSpec) -> bool:
    """Return whether a tensor is already stored as the spec states, so that its parts can be copied."""
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


def min_size(specs: Iterable[TensorSpec], size: int) -> int:
    """Return a lower bound of the number of bytes of a file with ``specs``; ``size`` is an upper bound.

    In the lower bound, parts of unknown length count as 0.
    """
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
    """Return the spec of the difference that ``encoder`` of ``codec`` will write for the fine-tune's ``tensor``."""
    return encoded_spec(tensor.name, replace(tensor, dtype=tensor.dtype if codec.exact else "f32"), encoder, encoding)


def _stored_dtype(parts: Sequence[PartSpec], default: str) -> str:
    return (parts[0].type or parts[0].dtype) if len(parts) == 1 else default


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The result of one chunk. The writing thread calls ``commit`` for one chunk after another, in order."""

    parts: Mapping[str, Any]
    error: ErrorStats | None = None
    commit: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of a tensor of ``rows`` x ``cols``: ``chunk_rows`` rows each, which need ``cost`` bytes of memory.

    If several workers share a step, the chunks of a worker begin at row ``first`` and end before row ``last``.
    """

    rows: int
    cols: int
    chunk_rows: int
    cost: int
    first: int = 0
    last: int | None = None

    @property
    def end(self) -> int:
        """The row after the last row of these chunks."""
        return self.rows if self.last is None else self.last


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """The memory for a step's chunks: ``limit`` bytes, in which ``slots`` chunks should fit.

    ``measured`` is set if the errors of inexact chunks are measured, which needs memory too.
    """

    limit: int
    slots: int
    measured: bool = False


ChunkTask = Callable[[], EncodedChunk]
"""A function that encodes a chunk in a thread of the pool."""

AcquireBudget = Callable[[], bool]
"""A function that waits for the memory of a chunk; returns False if the run was stopped."""


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
        Whether every value is preserved.
    encoder : optional
        The encoder of this step; None if this process encodes nothing.
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
        """The step as the plan contains it.

        This is the step itself, or the step that a worker runs if this step only collects the worker's results.
        """
        return self

    @property
    def in_bytes(self) -> int:
        """The number of stored bytes to read."""
        return self.tensor.nbytes

    @property
    def out_bytes(self) -> int:
        """The number of bytes to store, or an upper bound if the number depends on the values."""
        return sum(part.at_most for part in self.spec.parts)

    @property
    def decodes(self) -> Tensor | None:
        """The tensor whose values the step decodes; None if it decodes no tensor."""
        return self.tensor

    def row_ranges(self, hashed: Collection[int] = ()) -> tuple[int, int] | None:
        """Return the number of rows and the unit of workers' ranges, or None if workers cannot share the step.

        The range of each worker begins at a multiple of the unit, a number of rows. ``hashed`` contains the points at
        which a digest of the full tensor is required.
        """
        return None

    @abstractmethod
    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        """Return a plan of chunks that fit in ``budget``, or of the smallest possible chunks if none fit."""

    @abstractmethod
    def start(self, chunk_plan: ChunkPlan, hash_factories: HashFactories, *, measured: bool) -> StepRun[Any]:
        """Return the step in progress.

        ``hash_factories`` create the streams that hash values, by point. ``measured`` requests the errors of inexact
        chunks.
        """


S = TypeVar("S", bound=Step)


@dataclass
class StepRun(ABC, Generic[S]):
    """A step in progress: its state from the first byte that is read to the last byte that is written.

    ``measured`` is set if the error of inexact chunks is measured.
    """

    step: S
    chunk_plan: ChunkPlan
    hash_factories: HashFactories
    measured: bool = False
    streams: dict[int, HashStream] = field(default_factory=dict, init=False)

    def fit(self) -> Mapping[str, Any] | None:
        """Run the fit passes, and return the parameters that they determine; None if there are no fit passes."""
        return None

    @property
    def written(self) -> dict[str, Any] | None:
        """The writer's record if a worker has already written the tensor into the result, else None.

        It is valid after ``fit``.
        """
        return None

    @abstractmethod
    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        """Read chunk after chunk in the calling thread; yield the task of each and the number of bytes read for it.

        ``acquire`` is called before each chunk is read.
        """

    def notes(self) -> dict[str, Any]:
        """Return results of the chunks as JSON values: ``digests`` by point, and numbers.

        If several workers share a step, the sums of their numbers are the results of the step.
        """
        return {"digests": {str(point): stream.hex for point, stream in self.streams.items() if stream.is_separate}}


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step whose result is written: its spec with the parameters of fit passes, its bytes, errors and notes."""

    step: Step
    nbytes: int
    error: ErrorStats
    notes: Mapping[str, Any]

    def digest(self, point: int) -> str | None:
        """Return the digest of the values at ``point`` in hexadecimal digits; None if they were not hashed."""
        digests: Mapping[str, str] = self.notes.get("digests", {})
        return digests.get(str(point))


@dataclass(frozen=True)
class Plan:
    """All steps in output order, and the other inputs that determine the bytes of the weight files.

    Parameters
    ----------
    steps : sequence of Step
    format : Format
    metadata : mapping
        The metadata in the form in which the format stores it.
    options : WriteOptions
    measured : bool
        Whether the errors of inexact steps are measured.
    attachments : Attachments
    config : bytes, optional
        The adapted ``config.json``; see ``Artifact``.
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
        """The description of the files for the format's writer."""
        before = {} if self.config is None else {step.spec.name: step.tensor for step in self.steps}
        return Artifact(self.specs, self.metadata, self.attachments, self.config, before)

    @property
    def in_bytes(self) -> int:
        """The number of stored bytes that are read."""
        return sum(step.in_bytes for step in self.steps)

    @cached_property
    def size(self) -> int:
        """The number of bytes of the weight files, including headers and padding.

        It is an upper bound if ``size_exact`` is False: with zstd, with sparse codecs, and in formats that store equal
        parts once.
        """
        return self.format.size(self.artifact, self.options)

    @property
    def size_exact(self) -> bool:
        """Whether ``size`` is the exact number of bytes."""
        return knows_size(self.format, self.specs)

    @property
    def min_size(self) -> int:
        """A lower bound of the bytes of the weight files: parts of unknown length count as 0.

        The bound assumes that no two parts are equal.
        """
        return min_size(self.specs, self.size)
