"""The step of two versions of a tensor: read both, encode their difference, hash them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder
from ingot.codecs.table import CODECS
from ingot.core.buffers import scratch
from ingot.core.checksums import Blake3, hex_of
from ingot.core.dtypes import file_bytes, numpy_dtype
from ingot.core.floats import FLOATS
from ingot.core.stats import measure
from ingot.engine import cost
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.watch import BASE, RESULT, Watches
from ingot.engine.work import Chunking, Encoded, Room, Running, Step, Take, Work
from ingot.errors import IngotError
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True)
class Diff(Step):
    """Stores the difference of two tensors of one shape: ``base``, of source 0, and ``tensor``, of source 1.

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
    def encoders(self) -> Sequence[DeltaEncoder]:
        return (self.encoder,)

    def chunking(self, room: Room) -> Chunking:
        tensor, encoder, codec = self.tensor, self.encoder, self.codec
        elementwise = codec.elementwise and CODECS[self.base.codec].elementwise
        matrix = matrix_of(tensor) if elementwise else tensor.matrix_shape
        rebuilt = 0 if encoder.lossless else 8
        per_element = cost.per_element(self.base, tensor) + 2 * self.out_bytes / max(tensor.size, 1) + 8 + rebuilt
        step: int | None = encoder.step
        if encoder.single_chunk:
            step = None
        elif codec.elementwise and matrix[1]:
            step = encoder.step // gcd(encoder.step, matrix[1])
        return cost.by_rows(matrix, per_element * matrix[1], cost.fixed_cost(self.base, tensor), room, step)

    def begin(self, shape: Chunking, watches: Watches, *, measured: bool) -> Running:
        return _Comparing(shape, step=self, watches=watches, measured=measured and self.tensor.dtype in FLOATS)


@dataclass(kw_only=True)
class _Comparing(Running):
    step: Diff
    watches: Watches
    measured: bool
    _rebuilt: Blake3 | None = None
    _moved: float = 0.0

    def learn(self) -> Mapping[str, Any] | None:
        encoder = self.step.encoder
        if not encoder.fit_passes:
            return None
        matrix = (self.shape.rows, self.shape.cols)
        for _ in range(encoder.fit_passes):
            pairs = (chunks(tensor, matrix, self.shape.chunk_rows) for tensor in (self.step.base, self.step.tensor))
            for old, new in zip(*pairs, strict=True):
                try:
                    encoder.fit_pass(old, new)
                except IngotError as error:
                    raise error.at(self.step.tensor.name) from None
        return encoder.params

    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        step, shape = self.step, self.shape
        pair = (step.base, step.tensor)
        readers = [CODECS[tensor.codec].reader(tensor) for tensor in pair]
        # What patching gives is the fine-tune itself, or made anew of each chunk's parts.
        direct = {point for point in self.watches if point == BASE or step.encoder.lossless}
        self.feeds = {point: self.watches[point].tensor(step.tensor.name) for point in sorted(direct)}
        if RESULT in self.watches and not step.encoder.lossless:
            self._rebuilt = Blake3()
        share = step.in_bytes / max(shape.rows, 1)
        kinds, start = [numpy_dtype(tensor.dtype) for tensor in pair], 0
        while start < shape.rows or start == 0:
            if not take():
                return
            stop = min(start + shape.chunk_rows, shape.rows)
            rows = [scratch((stop - start, shape.cols), kind) for kind in kinds]
            for reader, out in zip(readers, rows, strict=True):
                reader.read_into(out)
            waits = [feed.take(rows[point]) for point, feed in self.feeds.items()]
            yield partial(self._encode, rows[0], rows[1], start, waits), int(stop * share) - int(start * share)
            start = max(stop, 1)
        for reader in readers:
            reader.finish()

    def _encode(self, old: Array, new: Array, start: int, waits: list[Future[None]]) -> Encoded:
        step = self.step
        try:
            parts = step.encoder.encode(old, new, start)
        except IngotError as error:
            name = step.tensor.name
            raise error if error.where and name in error.where else error.at(name) from None
        stats, settle = None, None
        if not step.encoder.lossless and (self.measured or self._rebuilt is not None):
            rebuilt = scratch(new.shape, new.dtype)
            step.encoder.rebuild(parts, old, rebuilt)
            stats = measure(new, rebuilt) if self.measured else None
            moved = measure(new, old).squared_error if self.measured and step.base.dtype in FLOATS else 0.0
            settle = partial(self._settle, moved, file_bytes(rebuilt) if self._rebuilt is not None else b"")
        for wait in waits:
            wait.result()
        return Encoded(parts, stats, settle)

    def _settle(self, moved: float, data: Any) -> None:
        """Take in what a chunk told, in order."""
        self._moved += moved
        if self._rebuilt is not None:
            self._rebuilt.update(data)

    def notes(self) -> dict[str, Any]:
        found = super().notes()
        if self._rebuilt is not None:
            found["digests"][str(RESULT)] = hex_of(self._rebuilt)
        return {**found, "moved": self._moved}
