"""``delta_sparse``: the largest differences at flat positions (``.wdelta`` strategy ``sparse``; ``spec/wdelta.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import ChunkParts, Codec, decode_by_rows
from ingot.codecs.cast import flat
from ingot.codecs.delta.flat import (
    BATCH,
    Addition,
    BatchAddingReader,
    Differences,
    SingleChunkEncoder,
    check_parts,
    matrix_rows,
    require_count,
    require_options,
    require_source,
    share_option,
)
from ingot.codecs.delta.readers import PositionReader, place_values
from ingot.codecs.delta.top import StreamedEncoder, grid_of, streams
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.delta import SparseDeltaLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = SparseDeltaLayout.codec
PARTS = {"indices": ("i64",), "values": ("f32",)}
_NONE = np.empty(0, np.int64), np.empty(0, np.float32)


def kept_count(size: int, sparsity: float) -> int:
    """Return how many of ``size`` differences are stored with a given sparsity: at least 1 if ``size`` is not 0."""
    return min(size, max(1, int(size * (1.0 - sparsity))))


class _Decoding:
    """The decoding of a chunk for both encoders, to measure the error."""

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        parts = _alone(parts)
        flat = out.reshape(-1)
        flat.view(np.uint8).fill(0)
        place_values(parts["indices"], parts["values"], flat)

    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        parts = _alone(parts)
        target = Addition(base.reshape(-1), flat(out), None, less=False)
        native.kernels.placed_add(parts["indices"], 0, parts["values"], *target.arguments)


def _alone(parts: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the parts of a chunk; positions count from the chunk's first element."""
    return parts.within if isinstance(parts, ChunkParts) else parts


@dataclass(kw_only=True, eq=False)
class SparseEncoder(_Decoding, SingleChunkEncoder):
    """An encoder that stores the ``count`` differences with the largest magnitudes."""

    codec: str = ID
    count: int

    def encode_differences(self, differences: Differences, rows: int, start: int) -> dict[str, Array]:
        positions, values, _ = self.largest(differences, self.count)
        return {"indices": positions, "values": values}


@dataclass(kw_only=True, eq=False)
class StreamedSparseEncoder(_Decoding, StreamedEncoder):
    """An encoder that returns the same bytes in chunks, after a pass that finds the largest differences."""

    codec: str = ID

    def encode_differences(self, differences: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the parts of these rows; raise ``CodecError`` ``delta_sparse.whole`` if the fit pass is incomplete."""
        cut = self.cut(differences.size, rows, start)
        chunk = ChunkParts(indices=cut.positions + cut.first, values=cut.largest)
        chunk.start, chunk.within = start, {"indices": cut.positions, "values": cut.largest}
        return chunk


class SparseReader(BatchAddingReader):
    """A sequential reader that buffers the stored values of a batch."""

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        self._stored = PositionReader(tensor, "indices", "values")
        self._next = 0

    def fill(self, out: Array) -> None:
        flat = out.reshape(-1)
        for start in range(0, flat.size, BATCH):
            batch = flat[start : start + BATCH]
            batch.view(np.uint8).fill(0)
            for positions, values in self._stored.until(self._next + batch.size):
                place_values(positions - self._next, values, batch, self._name)
            self._next += batch.size

    def add(self, addition: Addition) -> None:
        start = self._next
        stop = self._next + addition.base.size
        for positions, values in self._stored.until(stop):
            self._add(addition, start, int(positions[-1]) + 1, (positions, values))
        self._add(addition, start, stop, _NONE)

    def _add(self, addition: Addition, start: int, stop: int, stored: tuple[Array, Array]) -> None:
        """Add the values stored before element ``stop`` of the tensor; ``addition`` begins at element ``start``."""
        target, (positions, values) = addition.part(self._next - start, stop - start), stored
        native.kernels.placed_add(positions, self._next, values, *target.arguments)
        self._next = stop

    def skip(self, count: int) -> None:
        """Skip ``count`` differences."""
        self._stored.skip(self._next + count)
        self._next += count

    def finish(self) -> None:
        self._stored.finish()


class DeltaSparse(Codec):
    """Positions and f32 values of the largest differences; other differences are 0."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    checks_stored: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_sparse.dtype``, ``.parts``, ``.part-dtype``,
        ``.size``.
        """
        counts = check_parts(tensor, PARTS)
        require_count(tensor, "values", counts["values"], counts["indices"])
        if counts["indices"] > tensor.size:
            raise CodecError(
                "delta_sparse.size",
                f"expected at most {tensor.size} positions, found {counts['indices']}",
                where=f"{tensor.name}.indices",
            )

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the differences in f32, f16 or bf16. Positions are checked: rules ``.index`` and ``.duplicate``."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> SparseReader:
        self.check(tensor)
        return SparseReader(tensor)

    def stored(self, tensor: Tensor) -> Iterator[Array]:
        """Yield the stored differences; raise the errors of ``decode``."""
        self.check(tensor)
        reader = PositionReader(tensor, "indices", "values")
        for _, values in reader.until(tensor.size):
            yield values
        reader.finish()

    def encoder(
        self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]
    ) -> SparseEncoder | StreamedSparseEncoder:
        """Return the encoder. Option ``sparsity``: the fraction of differences to drop (0.9)."""
        require_options(self.id, options, ("sparsity",))
        require_source(self.id, dtype)
        sparsity = share_option(self.id, options, "sparsity", 0.9, below=0)
        size = prod(shape)
        count = kept_count(size, sparsity)
        parts = (PartSpec("indices", "i64", 8 * count), PartSpec("values", "f32", 4 * count))
        fields: dict[str, Any] = {"size": size, "count": count, "parts": parts, "params": {"sparsity": sparsity}}
        if streams(size):
            return StreamedSparseEncoder(**fields, step=grid_of(*matrix_rows(shape)))
        return SparseEncoder(**fields)
