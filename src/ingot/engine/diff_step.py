"""The step that reads two versions of a tensor, encodes their difference and hashes their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder
from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, FLOATS, file_bytes, numpy_dtype
from ingot.core.numeric.stats import measure, squared_error
from ingot.engine import resources as cost
from ingot.engine.chunks import matrix_of
from ingot.engine.fit import cast_exactly, fit_rows, paired_chunks, rows_of, window
from ingot.engine.hashing import BASE, RESULT, HashFactories
from ingot.engine.steps import skips_rows
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import IngotError, IntegrityError
from ingot.model.reading.slices import SkippingReader
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True)
class Diff(Step):
    """A step that stores the difference between ``base`` (source 0) and ``tensor`` (source 1).

    The base is first converted to the shape and type of ``tensor`` (``engine.fit``). If ``codec`` is exact, both are
    cast to the element type of ``spec``: that of ``tensor``, or that of the base if a cast there and back preserves
    every bit of ``tensor``. ``codec`` creates ``encoder`` from ``options``. The base's values are hashed at point
    ``BASE``, the patched values at ``RESULT``. If errors are measured, ``notes`` contains ``moved``: the squared norm
    of the difference.
    """

    base: Tensor = field(kw_only=True)
    codec: DeltaCodec = field(kw_only=True)
    encoder: DeltaEncoder = field(kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def in_bytes(self) -> int:
        return self.base.nbytes + self.tensor.nbytes

    @property
    def cast(self) -> str | None:
        """The element type to which both tensors are cast before their difference is encoded; None for no cast."""
        return self.spec.dtype if self.codec.exact else None

    @property
    def resized(self) -> bool:
        """Whether base and fine-tune have different numbers of rows."""
        return self.base.shape != self.tensor.shape

    def plan_chunks(self, budget: ChunkBudget) -> ChunkPlan:
        tensor = self.tensor
        encoder = self.encoder
        matrix = self._matrix()
        rebuilt = 0 if encoder.lossless else 8
        fits = DTYPES[tensor.dtype].bits / 4 if self.resized or self.base.dtype != tensor.dtype else 0
        per_element = cost.per_element(self.base, tensor) + 2 * self.out_bytes / max(tensor.size, 1) + 8 + rebuilt
        per_element += fits
        step = None if encoder.single_chunk else self._unit(matrix)
        return cost.by_rows(matrix, per_element * matrix[1], cost.fixed_cost(self.base, tensor), budget, step)

    def row_ranges(self, hashed: Collection[int] = ()) -> tuple[int, int] | None:
        """Return the number of rows and the unit of workers' ranges, or None if workers cannot share the step.

        The conditions of ``Encode.row_ranges`` apply to both tensors. Workers also cannot share a tensor if base and
        fine-tune differ in rows, or if the delta is lossy and the digest of the patched values is required.
        """
        encoder = self.encoder
        pair = (self.base, self.tensor)
        single_worker = encoder.fit_passes or encoder.single_chunk or (RESULT in hashed and not encoder.lossless)
        single_worker = single_worker or self.resized
        compressed = any(part.encoding != "raw" for part in self.spec.parts)
        if single_worker or compressed or not all(map(skips_rows, pair)):
            return None
        matrix = self._matrix()
        return matrix[0], self._unit(matrix)

    def _matrix(self) -> tuple[int, int]:
        elementwise = self.codec.elementwise and CODECS[self.base.codec].elementwise
        return matrix_of(self.tensor) if elementwise else self.tensor.matrix_shape

    def _unit(self, matrix: tuple[int, int]) -> int:
        """Return the row alignment of chunks: each chunk must begin at a multiple of this number of rows."""
        step = self.encoder.step
        return step // gcd(step, matrix[1]) if self.codec.elementwise and matrix[1] else step

    def start(self, chunk_plan: ChunkPlan, hash_factories: HashFactories, *, measured: bool) -> _Comparing:
        return _Comparing(self, chunk_plan, hash_factories, measured and self.tensor.dtype in FLOATS)


@dataclass
class _Comparing(StepRun[Diff]):
    _rebuilt: Blake3 | None = field(default=None, init=False)
    _moved: float = field(default=0.0, init=False)

    def fit(self) -> Mapping[str, Any] | None:
        encoder = self.step.encoder
        if not encoder.fit_passes:
            return None
        step = self.step
        matrix = (self.chunk_plan.rows, self.chunk_plan.cols)
        for _ in range(encoder.fit_passes):
            for old, new in paired_chunks(step.base, step.tensor, matrix, self.chunk_plan.chunk_rows, step.cast):
                try:
                    encoder.fit_pass(old, new)
                except IngotError as error:
                    raise error.add_location(step.tensor.name) from None
        return encoder.params

    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        step = self.step
        plan = self.chunk_plan
        pair = (step.base, step.tensor)
        readers = [CODECS[tensor.codec].reader(tensor) for tensor in pair]
        self._open_streams()
        share = step.in_bytes / max(plan.rows, 1)
        dtypes = [numpy_dtype(tensor.dtype) for tensor in pair]
        start = plan.first
        counts = [rows_of(tensor.shape, plan.cols) for tensor in pair]
        for reader in readers if start else ():
            assert isinstance(reader, SkippingReader)
            reader.skip(start * plan.cols)
        while start < plan.end or start == 0:
            if not acquire():
                return
            stop = min(start + plan.chunk_rows, plan.end)
            sizes = [window(start, stop, count) for count in counts]
            rows = [scratch((size, plan.cols), dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
            for reader, out in zip(readers, rows, strict=True):
                reader.read_into(out)
            waits = [stream.update(rows[point]) for point, stream in self.streams.items()]
            yield partial(self._encode, rows[0], rows[1], start, waits), int(stop * share) - int(start * share)
            start = max(stop, 1)
        for start in range(plan.rows, counts[BASE], plan.chunk_rows):  # rows that the fine-tune lacks
            old = scratch((min(plan.chunk_rows, counts[BASE] - start), plan.cols), dtypes[BASE])
            readers[BASE].read_into(old)
            if BASE in self.streams:
                self.streams[BASE].update(old).result()
        for reader in readers if plan.last is None else ():
            reader.finish()

    def _open_streams(self) -> None:
        # The patched values equal the fine-tune if the encoder is lossless. Otherwise they are rebuilt per chunk.
        direct = {point for point in self.hash_factories if point == BASE or self.step.encoder.lossless}
        self.streams = {point: self.hash_factories[point].stream(self.step.tensor.name) for point in sorted(direct)}
        if RESULT in self.hash_factories and not self.step.encoder.lossless:
            self._rebuilt = Blake3()

    def _encode(self, old: Array, new: Array, start: int, waits: list[Future[None]]) -> EncodedChunk:
        step = self.step
        shared = min(len(old), len(new))
        old = fit_rows(old, len(new), step.cast)
        values = new if step.cast in (None, step.tensor.dtype) else cast_exactly(new, str(step.cast))
        if values is None:
            raise IntegrityError(
                "delta.result", f"expected values that {step.cast} represents exactly", where=step.tensor.name
            )
        try:
            parts = step.encoder.encode(old, values, start)
        except IngotError as error:
            name = step.tensor.name
            raise error if error.where and name in error.where else error.add_location(name) from None
        stats = None
        commit = None
        if not step.encoder.lossless and (self.measured or self._rebuilt is not None):
            rebuilt = scratch(new.shape, new.dtype)
            step.encoder.rebuild(parts, old, rebuilt)
            stats = measure(new, rebuilt) if self.measured else None
            moved = squared_error(new[:shared], old[:shared]) if self.measured and step.base.dtype in FLOATS else 0.0
            commit = partial(self._commit, moved, file_bytes(rebuilt) if self._rebuilt is not None else b"")
        for wait in waits:
            wait.result()
        return EncodedChunk(parts, stats, commit)

    def _commit(self, moved: float, data: Any) -> None:
        """Add the results of a chunk to the totals; called in the order of chunks."""
        self._moved += moved
        if self._rebuilt is not None:
            self._rebuilt.update(data)

    def notes(self) -> dict[str, Any]:
        notes = super().notes()
        if self._rebuilt is not None:
            notes["digests"][str(RESULT)] = hex_of(self._rebuilt)
        return {**notes, "moved": self._moved}
