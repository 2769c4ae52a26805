"""Steps of one tensor: move what is stored, put it into another layout, or encode its values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ingot.codecs import base
from ingot.codecs.base import Encoder, row_step
from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.engine import cost
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.watch import RESULT, Watches
from ingot.engine.work import Chunking, Encoded, Room, Running, Step, Take, Work
from ingot.errors import CodecError, IngotError
from ingot.model.part import StoredReader
from ingot.model.reading.slices import Skipping
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor

_UNIT = 1 << 16
MOVED, REPACKED, DECODED, ENCODED = "moved", "repacked", "decoded", "encoded"


@dataclass(frozen=True)
class Move(Step):
    """Copies stored bytes as they are. ``source`` is the number of the checkpoint that the tensor is of."""

    action: str = field(default=MOVED, init=False)
    rule: str = field(default=MOVED, kw_only=True)
    source: int = field(default=0, kw_only=True)

    encodes_parts: ClassVar[bool] = False

    @property
    def decodes(self) -> Tensor | None:
        return None

    def chunking(self, room: Room) -> Chunking:
        piece = max(cost.MOVE_LEAST, min(cost.MOVE_BYTES, room.budget // room.slots))
        return Chunking(self.in_bytes, 1, piece, min(piece, self.in_bytes))

    def begin(self, shape: Chunking, watches: Watches, *, measured: bool) -> Running:
        return _Moving(shape, tensor=self.tensor)


@dataclass(kw_only=True)
class _Moving(Running):
    tensor: Tensor

    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        for role, part in self.tensor.parts.items():
            reader = StoredReader(part)
            for start in range(0, part.length, self.shape.chunk_rows):
                if not take():
                    return
                data = scratch((min(self.shape.chunk_rows, part.length - start),), np.uint8)
                reader.readinto(data.data)
                yield partial(Encoded, {role: data}), data.nbytes
            reader.finish()


@dataclass(frozen=True)
class Repack(Step):
    """Puts the same integers into another layout; ``repack`` does it. ``source`` as of ``Move``."""

    action: str = field(default=REPACKED, init=False)
    repack: base.Repacked = field(kw_only=True)
    source: int = field(default=0, kw_only=True)

    encodes_parts: ClassVar[bool] = False

    @property
    def decodes(self) -> Tensor | None:
        return None

    def chunking(self, room: Room) -> Chunking:
        repack = self.repack
        per_row = max(repack.memory, 1)
        most = room.budget if repack.again else min(cost.REPACK_BYTES, room.budget // room.slots)
        count = max(1, (most - repack.extra_memory) // per_row // repack.step) * repack.step
        count = min(count, max(repack.rows, 1))
        return Chunking(repack.rows, 1, count, count * per_row + repack.extra_memory)

    def begin(self, shape: Chunking, watches: Watches, *, measured: bool) -> Running:
        return _Repacking(shape, step=self)


@dataclass(frozen=True)
class Recode(Repack):
    """Puts the same parts into other encodings, or into none: decoded here, encoded as the spec says on their way."""

    encodes_parts: ClassVar[bool] = True


def recode(tensor: Tensor, spec: TensorSpec, rule: str, source: int = 0) -> Recode:
    """Return the step that writes a tensor's parts as ``spec`` has them, whose decoded bytes are the same."""
    size = sum(part.nbytes for part in tensor.parts.values())
    rows = -(-size // _UNIT)
    found = base.Repacked(tensor.layout, spec.parts, rows, 1, 2 * _UNIT, None, lambda: _Decoded(tensor))
    return Recode(tensor, spec, rule=rule, repack=found, source=source)


class _Decoded:
    """The decoded bytes of a tensor's parts, one part after the other; a row is ``_UNIT`` of them."""

    def __init__(self, tensor: Tensor) -> None:
        self._left = [(role, part.nbytes, part.reader()) for role, part in tensor.parts.items()]
        self._read = 0

    def read(self, rows: int) -> dict[str, Array]:
        """Return the next bytes, with the roles that they are of."""
        found: dict[str, Array] = {}
        room = rows * _UNIT
        while room and self._left:
            role, size, reader = self._left[0]
            piece = np.empty(min(room, size - self._read), np.uint8)
            reader.readinto(piece.data)
            found[role] = piece
            room -= piece.size
            self._read += piece.size
            if self._read == size:
                reader.finish()
                self._left.pop(0)
                self._read = 0
        return found

    def finish(self) -> None:
        """Check the digests of parts without bytes."""
        for _, _, reader in self._left:
            reader.finish()


@dataclass(kw_only=True)
class _Repacking(Running):
    step: Repack

    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        """Repack chunk by chunk where they are read: shifting bits is not slower than a disk."""
        share = self.step.tensor.nbytes / max(self.shape.rows, 1)
        reader, start = self.step.repack.reader(), 0
        while start < self.shape.rows or start == 0:
            if not take():
                return
            stop = min(start + self.shape.chunk_rows, self.shape.rows)
            yield partial(Encoded, reader.read(stop - start)), int(stop * share) - int(start * share)
            start = max(stop, 1)
        reader.finish()


def skips_rows(tensor: Tensor) -> bool:
    """Whether rows of a tensor can be read without those before, and no digest proves it only as a whole."""
    codec = CODECS[tensor.codec]
    stored = any(part.encoding != "raw" or part.digest is not None for part in tensor.parts.values())
    return codec.streams and not stored and isinstance(codec.reader(tensor), Skipping)


@dataclass(frozen=True)
class Encode(Step):
    """Encodes decoded values.

    ``options`` are those that its codec made ``encoder`` of, from the tensor's shape and element type.
    ``keeps_weights`` tells whether what is not left out survives. ``source`` as of ``Move``. Its values pass at point
    ``RESULT``.
    """

    encoder: Encoder = field(kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    keeps_weights: bool = field(default=True, kw_only=True)
    source: int = field(default=0, kw_only=True)

    @property
    def encoders(self) -> Sequence[Encoder]:
        return (self.encoder,)

    @property
    def scratch(self) -> int:
        return self.encoder.scratch_bytes()

    def chunking(self, room: Room) -> Chunking:
        tensor, encoder = self.tensor, self.encoder
        matrix = matrix_of(tensor, encoder.codec)
        step = None if encoder.single_chunk else row_step(CODECS[encoder.codec], encoder, matrix[1])
        per_row = self._cost_per_element(room.measured) * matrix[1]
        return cost.by_rows(matrix, per_row, cost.fixed_cost(tensor), room, step)

    def pieces(self, hashed: Collection[int] = ()) -> tuple[int, int] | None:
        """As ``Step.pieces``.

        Not cut is what is learnt of all rows first, or encoded of all at once, what is compressed afterwards, in frames
        across pieces, and what a digest proves only as a whole.
        """
        tensor, encoder = self.tensor, self.encoder
        whole = encoder.fit_passes or encoder.single_chunk
        encoded = any(part.encoding != "raw" or part.length is None for part in self.spec.parts)
        if whole or encoded or not skips_rows(tensor):
            return None
        rows, cols = matrix_of(tensor, encoder.codec)
        return rows, row_step(CODECS[encoder.codec], encoder, cols)

    def _cost_per_element(self, measured: bool) -> float:
        """Bytes of memory per element of a chunk: source rows, stored source, outputs (twice: allocator), scratch."""
        outputs = self.out_bytes if self.encoder.single_chunk else 2 * self.out_bytes
        error = 4 if measured else 0
        # A codec around another hands it a copy of what is kept, and gets it back to measure the error.
        inner = DTYPES[self.tensor.dtype].bits / 8 + error if "inner" in self.spec.params else 0
        own = self.encoder.scratch_bytes_per_element()
        return cost.per_element(self.tensor) + outputs / max(self.tensor.size, 1) + error + inner + own

    def begin(self, shape: Chunking, watches: Watches, *, measured: bool) -> Running:
        return _Encoding(shape, step=self, watches=watches, measured=measured)


@dataclass(kw_only=True)
class _Encoding(Running):
    step: Encode
    watches: Watches
    measured: bool

    def learn(self) -> Mapping[str, Any] | None:
        encoder, shape = self.step.encoder, self.shape
        if not encoder.fit_passes:
            return None
        try:
            for _ in range(encoder.fit_passes):
                for rows in chunks(self.step.tensor, (shape.rows, shape.cols), shape.chunk_rows):
                    encoder.fit_pass(rows)
        except CodecError as error:
            raise error.at(self.step.tensor.name) from None
        return encoder.params

    def work(self, take: Take) -> Iterator[tuple[Work, int]]:
        tensor, shape = self.step.tensor, self.shape
        self.feeds = {point: watch.tensor(tensor.name) for point, watch in self.watches.items() if point == RESULT}
        share = tensor.nbytes / max(shape.rows, 1)
        reader, start = CODECS[tensor.codec].reader(tensor), shape.first
        if start:
            assert isinstance(reader, Skipping)
            reader.skip(start * shape.cols)
        while start < shape.end or start == 0:
            if not take():
                return
            stop = min(start + shape.chunk_rows, shape.end)
            rows = scratch((stop - start, shape.cols), numpy_dtype(tensor.dtype))
            reader.read_into(rows)
            waits = [feed.take(rows) for feed in self.feeds.values()]
            yield partial(self._encode, rows, start, waits), int(stop * share) - int(start * share)
            start = max(stop, 1)
        if shape.last is None:
            reader.finish()

    def _encode(self, rows: Array, start: int, waits: list[Future[None]]) -> Encoded:
        step, error = self.step, None
        try:
            parts = step.encoder.encode(rows, start)
        except IngotError as failure:
            raise failure.at(step.tensor.name) from None
        if self.measured and not step.exact and step.action == ENCODED:
            decoded = np.empty(rows.shape, np.float32)
            step.encoder.decode(parts, decoded)
            error = measure(rows, decoded)
        for wait in waits:
            wait.result()
        return Encoded(parts, error)
