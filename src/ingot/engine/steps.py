"""Steps for one tensor: copy its stored bytes, repack it in another layout, or encode its values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ingot.codecs import base
from ingot.codecs.base import Encoder, row_step
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.engine import resources as cost
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.hashing import RESULT, HashFactories
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import CodecError, IngotError
from ingot.model.part import StoredReader
from ingot.model.reading.slices import SkippingReader
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor

_UNIT = 1 << 16
MOVED = "moved"
REPACKED = "repacked"
DECODED = "decoded"
ENCODED = "encoded"


@dataclass(frozen=True)
class Move(Step):
    """A step that copies stored bytes unchanged. ``source`` is the index of the tensor's checkpoint."""

    action: str = field(default=MOVED, init=False)
    rule: str = field(default=MOVED, kw_only=True)
    source: int = field(default=0, kw_only=True)
    compress_parts: bool = field(default=False, kw_only=True)

    @property
    def decodes(self) -> Tensor | None:
        return None

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        chunk_bytes = max(cost.MOVE_LEAST, min(cost.MOVE_BYTES, budget.limit // budget.slots))
        return ChunkPlan(self.in_bytes, 1, chunk_bytes, min(chunk_bytes, self.in_bytes))

    def start(self, chunk_plan: ChunkPlan, hash_factories: HashFactories, *, measured: bool) -> StepRun[Any]:
        return _Moving(self, chunk_plan, hash_factories, measured)


class _Moving(StepRun[Move]):
    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        for role, part in self.step.tensor.parts.items():
            reader = StoredReader(part)
            for start in range(0, part.length, self.chunk_plan.chunk_rows):
                if not acquire():
                    return
                data = scratch((min(self.chunk_plan.chunk_rows, part.length - start),), np.uint8)
                reader.readinto(data.data)
                yield partial(EncodedChunk, {role: data}), data.nbytes
            reader.finish()


@dataclass(frozen=True)
class Repack(Step):
    """A step that stores the same integers in another layout by ``repack``.

    ``source`` is the index of the tensor's checkpoint. ``compress_parts`` is set if the encodings of parts change.
    """

    action: str = field(default=REPACKED, init=False)
    repack: base.Repacked = field(kw_only=True)
    source: int = field(default=0, kw_only=True)
    compress_parts: bool = field(default=False, kw_only=True)

    @property
    def decodes(self) -> Tensor | None:
        return None

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        repack = self.repack
        per_row = max(repack.memory, 1)
        max_bytes = budget.limit if repack.again else min(cost.REPACK_BYTES, budget.limit // budget.slots)
        count = max(1, (max_bytes - repack.extra_memory) // per_row // repack.step) * repack.step
        count = min(count, max(repack.rows, 1))
        return ChunkPlan(repack.rows, 1, count, count * per_row + repack.extra_memory)

    def start(self, chunk_plan: ChunkPlan, hash_factories: HashFactories, *, measured: bool) -> StepRun[Any]:
        return _Repacking(self, chunk_plan, hash_factories, measured)


def recode(tensor: Tensor, spec: TensorSpec, rule: str, source: int = 0) -> Repack:
    """Return the step that decodes a tensor's parts and writes the same bytes in the encodings of ``spec``."""
    size = sum(part.nbytes for part in tensor.parts.values())
    rows = -(-size // _UNIT)
    repacked = base.Repacked(tensor.layout, spec.parts, rows, 1, 2 * _UNIT, None, lambda: _Decoded(tensor))
    return Repack(tensor, spec, rule=rule, repack=repacked, source=source, compress_parts=True)


class _Decoded:
    """A reader of a tensor's decompressed parts, one after the other.

    The unit of its chunks is a "row" of ``_UNIT`` bytes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._remaining = [(role, part.nbytes, part.reader()) for role, part in tensor.parts.items()]
        self._read = 0

    def read(self, rows: int) -> dict[str, Array]:
        """Return the next bytes, at most ``rows * _UNIT``, by the role of their part."""
        parts: dict[str, Array] = {}
        room = rows * _UNIT
        while room and self._remaining:
            role, size, reader = self._remaining[0]
            data = np.empty(min(room, size - self._read), np.uint8)
            reader.readinto(data.data)
            parts[role] = data
            room -= data.size
            self._read += data.size
            if self._read == size:
                reader.finish()
                self._remaining.pop(0)
                self._read = 0
        return parts

    def finish(self) -> None:
        """Finish the readers that ``read`` did not finish, which are those of empty parts, to check their digests."""
        for _, _, reader in self._remaining:
            reader.finish()


class _Repacking(StepRun[Repack]):
    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        """Read and repack chunk after chunk in the calling thread; the yielded tasks only return the results.

        Repacking is not slower than reading from a disk, so other threads would not help.
        """
        share = self.step.tensor.nbytes / max(self.chunk_plan.rows, 1)
        reader = self.step.repack.reader()
        start = 0
        while start < self.chunk_plan.rows or start == 0:
            if not acquire():
                return
            stop = min(start + self.chunk_plan.chunk_rows, self.chunk_plan.rows)
            yield partial(EncodedChunk, reader.read(stop - start)), int(stop * share) - int(start * share)
            start = max(stop, 1)
        reader.finish()


def skips_rows(tensor: Tensor) -> bool:
    """Return whether rows of a tensor can be read without the rows before them.

    No part may be compressed or have a digest, and the codec's reader must be able to skip rows.
    """
    codec = CODECS[tensor.codec]
    stored = any(part.encoding != "raw" or part.digest is not None for part in tensor.parts.values())
    return codec.streams and not stored and isinstance(codec.reader(tensor), SkippingReader)


@dataclass(frozen=True)
class Encode(Step):
    """A step that encodes decoded values.

    The codec created ``encoder`` from ``options`` and the tensor's shape and element type. ``keeps_weights`` states
    whether weights that are not pruned keep their values. ``source`` is the index of the tensor's checkpoint. The
    decoded values are hashed at point ``RESULT``.
    """

    encoder: Encoder = field(kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    keeps_weights: bool = field(default=True, kw_only=True)
    source: int = field(default=0, kw_only=True)

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        tensor = self.tensor
        encoder = self.encoder
        matrix = matrix_of(tensor, encoder.codec)
        step = None if encoder.single_chunk else row_step(CODECS[encoder.codec], encoder, matrix[1])
        per_row = self._cost_per_element(budget.measured) * matrix[1]
        return cost.by_rows(matrix, per_row, cost.fixed_cost(tensor), budget, step)

    def row_ranges(self, hashed: Collection[int] = ()) -> tuple[int, int] | None:
        """Return the number of rows and the unit of workers' ranges, or None if workers cannot share the step.

        Workers can share a step only if all of this is true. The encoder needs no fit pass, and supports several
        chunks. The parts of the result are not compressed, and their lengths do not depend on values. Rows of the
        source can be skipped (``skips_rows``).
        """
        tensor = self.tensor
        encoder = self.encoder
        single_worker = encoder.fit_passes or encoder.single_chunk
        encoded = any(part.encoding != "raw" or part.length is None for part in self.spec.parts)
        if single_worker or encoded or not skips_rows(tensor):
            return None
        rows, cols = matrix_of(tensor, encoder.codec)
        return rows, row_step(CODECS[encoder.codec], encoder, cols)

    def _cost_per_element(self, measured: bool) -> float:
        """Return the bytes of memory that each element of a chunk needs.

        They are the decoded row, the stored bytes, the outputs, and the encoder's scratch memory. Outputs count twice,
        because the allocator may keep a freed copy. If ``measured`` is true, the float32 values whose error is measured
        are added.
        """
        outputs = self.out_bytes if self.encoder.single_chunk else 2 * self.out_bytes
        error = 4 if measured else 0
        # A wrapper codec copies its input for the inner codec and decodes it to measure the error.
        inner = DTYPES[self.tensor.dtype].bits / 8 + error if "inner" in self.spec.params else 0
        scratch_bytes = self.encoder.scratch_bytes_per_element()
        return cost.per_element(self.tensor) + outputs / max(self.tensor.size, 1) + error + inner + scratch_bytes

    def start(self, chunk_plan: ChunkPlan, hash_factories: HashFactories, *, measured: bool) -> StepRun[Any]:
        return _Encoding(self, chunk_plan, hash_factories, measured)


class _Encoding(StepRun[Encode]):
    def fit(self) -> Mapping[str, Any] | None:
        encoder = self.step.encoder
        plan = self.chunk_plan
        if not encoder.fit_passes:
            return None
        try:
            for _ in range(encoder.fit_passes):
                for rows in chunks(self.step.tensor, (plan.rows, plan.cols), plan.chunk_rows):
                    encoder.fit_pass(rows)
        except CodecError as error:
            raise error.add_location(self.step.tensor.name) from None
        return encoder.params

    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        tensor = self.step.tensor
        plan = self.chunk_plan
        self.streams = {
            point: factory.stream(tensor.name) for point, factory in self.hash_factories.items() if point == RESULT
        }
        share = tensor.nbytes / max(plan.rows, 1)
        reader = CODECS[tensor.codec].reader(tensor)
        start = plan.first
        if start:
            assert isinstance(reader, SkippingReader)
            reader.skip(start * plan.cols)
        while start < plan.end or start == 0:
            if not acquire():
                return
            stop = min(start + plan.chunk_rows, plan.end)
            rows = scratch((stop - start, plan.cols), numpy_dtype(tensor.dtype))
            reader.read_into(rows)
            waits = [stream.update(rows) for stream in self.streams.values()]
            yield partial(self._encode, rows, start, waits), int(stop * share) - int(start * share)
            start = max(stop, 1)
        if plan.last is None:
            reader.finish()

    def _encode(self, rows: Array, start: int, waits: list[Future[None]]) -> EncodedChunk:
        step = self.step
        error = None
        try:
            parts = step.encoder.encode(rows, start)
        except IngotError as failure:
            raise failure.add_location(step.tensor.name) from None
        if self.measured and not step.exact and step.action == ENCODED:
            decoded = np.empty(rows.shape, np.float32)
            step.encoder.decode(parts, decoded)
            error = measure(rows, decoded)
        for wait in waits:
            wait.result()
        return EncodedChunk(parts, error)
