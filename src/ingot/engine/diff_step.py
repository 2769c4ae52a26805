"""The step of two versions of a tensor: read both, encode their difference, hash them meanwhile."""

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
from ingot.engine.fit import fitted, narrowed, paired_chunks, rows_of, window
from ingot.engine.steps import skips_rows
from ingot.engine.watch import BASE, RESULT, Watches
from ingot.engine.work import AcquireBudget, ChunkBudget, ChunkPlan, ChunkTask, EncodedChunk, Step, StepRun
from ingot.errors import IngotError, IntegrityError
from ingot.model.reading.slices import SkippingReader
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True)
class Diff(Step):
    """Stores the difference of two tensors: ``base``, of source 0, and ``tensor``, of source 1.

    The base is fitted to ``tensor`` first (``engine.fit``). If ``codec`` is exact, both are cast to the element type of
    ``spec`` before: that of ``tensor``, or of the base where a cast there and back keeps every bit of ``tensor``.
    ``codec`` makes ``encoder`` of ``options``. The base's values pass at point ``BASE``, what patching will give at
    ``RESULT``. ``notes`` tell ``moved`` beside: the squared norm of the difference, where errors were measured.
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
        """The element type that the difference is taken in; None if values are taken as they are."""
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
        """Return the rows and the unit of ``Step.row_ranges``; see ``Encode.row_ranges``.

        Workers do not share a tensor either if the digest of the patched values is required and the delta is lossy.
        """
        encoder = self.encoder
        pair = (self.base, self.tensor)
        whole = encoder.fit_passes or encoder.single_chunk or (RESULT in hashed and not encoder.lossless)
        whole = whole or self.resized
        compressed = any(part.encoding != "raw" for part in self.spec.parts)
        if whole or compressed or not all(map(skips_rows, pair)):
            return None
        matrix = self._matrix()
        return matrix[0], self._unit(matrix)

    def _matrix(self) -> tuple[int, int]:
        elementwise = self.codec.elementwise and CODECS[self.base.codec].elementwise
        return matrix_of(self.tensor) if elementwise else self.tensor.matrix_shape

    def _unit(self, matrix: tuple[int, int]) -> int:
        """Return the rows at whose multiples chunks begin."""
        step = self.encoder.step
        return step // gcd(step, matrix[1]) if self.codec.elementwise and matrix[1] else step

    def start(self, chunk_plan: ChunkPlan, watches: Watches, *, measured: bool) -> _Comparing:
        return _Comparing(self, chunk_plan, watches, measured and self.tensor.dtype in FLOATS)


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
                    raise error.at(step.tensor.name) from None
        return encoder.params

    def tasks(self, acquire: AcquireBudget) -> Iterator[tuple[ChunkTask, int]]:
        step = self.step
        plan = self.chunk_plan
        pair = (step.base, step.tensor)
        readers = [CODECS[tensor.codec].reader(tensor) for tensor in pair]
        self._open_feeds()
        share = step.in_bytes / max(plan.rows, 1)
        kinds, start = [numpy_dtype(tensor.dtype) for tensor in pair], plan.first
        counts = [rows_of(tensor.shape, plan.cols) for tensor in pair]
        for reader in readers if start else ():
            assert isinstance(reader, SkippingReader)
            reader.skip(start * plan.cols)
        while start < plan.end or start == 0:
            if not acquire():
                return
            stop = min(start + plan.chunk_rows, plan.end)
            sizes = [window(start, stop, count) for count in counts]
            rows = [scratch((size, plan.cols), kind) for size, kind in zip(sizes, kinds, strict=True)]
            for reader, out in zip(readers, rows, strict=True):
                reader.read_into(out)
            waits = [feed.take(rows[point]) for point, feed in self.feeds.items()]
            yield partial(self._encode, rows[0], rows[1], start, waits), int(stop * share) - int(start * share)
            start = max(stop, 1)
        for start in range(plan.rows, counts[BASE], plan.chunk_rows):  # rows that the fine-tune has not
            old = scratch((min(plan.chunk_rows, counts[BASE] - start), plan.cols), kinds[BASE])
            readers[BASE].read_into(old)
            if BASE in self.feeds:
                self.feeds[BASE].take(old).result()
        for reader in readers if plan.last is None else ():
            reader.finish()

    def _open_feeds(self) -> None:
        # What patching gives is the fine-tune itself, or made anew of each chunk's parts.
        direct = {point for point in self.watches if point == BASE or self.step.encoder.lossless}
        self.feeds = {point: self.watches[point].tensor(self.step.tensor.name) for point in sorted(direct)}
        if RESULT in self.watches and not self.step.encoder.lossless:
            self._rebuilt = Blake3()

    def _encode(self, old: Array, new: Array, start: int, waits: list[Future[None]]) -> EncodedChunk:
        step = self.step
        shared = min(len(old), len(new))
        old = fitted(old, len(new), step.cast)
        values = new if step.cast in (None, step.tensor.dtype) else narrowed(new, str(step.cast))
        if values is None:
            raise IntegrityError(
                "delta.result", f"expected values of {step.cast}, found others", where=step.tensor.name
            )
        try:
            parts = step.encoder.encode(old, values, start)
        except IngotError as error:
            name = step.tensor.name
            raise error if error.where and name in error.where else error.at(name) from None
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
        """Add the results of a chunk, in order."""
        self._moved += moved
        if self._rebuilt is not None:
            self._rebuilt.update(data)

    def notes(self) -> dict[str, Any]:
        found = super().notes()
        if self._rebuilt is not None:
            found["digests"][str(RESULT)] = hex_of(self._rebuilt)
        return {**found, "moved": self._moved}
