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
    PIECE,
    Addition,
    AddsByPieces,
    Differences,
    WholeEncoder,
    check_parts,
    matrix_rows,
    require_count,
    require_options,
    require_source,
    share_option,
)
from ingot.codecs.delta.readers import Placed, place
from ingot.codecs.delta.top import StreamedEncoder, grid_of, streams
from ingot.core import native
from ingot.errors import CodecError
from ingot.model.layouts.delta import SparseDeltaLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = SparseDeltaLayout.codec
PARTS = {"indices": ("i64",), "values": ("f32",)}
_NONE = np.empty(0, np.int64), np.empty(0, np.float32)


def kept(size: int, sparsity: float) -> int:
    """Return how many of ``size`` differences are kept: at least one, if there is one."""
    return min(size, max(1, int(size * (1.0 - sparsity))))


class _Decoding:
    """What both encoders decode by, to measure the error."""

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        parts, flat = _alone(parts), out.reshape(-1)
        flat.view(np.uint8).fill(0)
        place(parts["indices"], parts["values"], flat)

    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        parts = _alone(parts)
        target = Addition(base.reshape(-1), flat(out), None, less=False)
        native.kernels.placed_add(parts["indices"], 0, parts["values"], *target.arguments)


def _alone(parts: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return parts whose positions count from the first element of what is decoded."""
    return parts.within if isinstance(parts, ChunkParts) else parts


@dataclass(kw_only=True, eq=False)
class SparseEncoder(_Decoding, WholeEncoder):
    """Keeps the ``count`` differences of the largest magnitude."""

    codec: str = ID
    count: int

    def encode_of(self, of: Differences, rows: int, start: int) -> dict[str, Array]:
        positions, values, _ = self.largest(of, self.count)
        return {"indices": positions, "values": values}


@dataclass(kw_only=True, eq=False)
class StreamedSparseEncoder(_Decoding, StreamedEncoder):
    """The same bytes in chunks, after one pass that finds the largest."""

    codec: str = ID

    def encode_of(self, of: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the parts of these rows; rule ``delta_sparse.whole`` before the fit pass."""
        cut = self.cut(of.size, rows, start)
        chunk = ChunkParts(indices=cut.at + cut.first, values=cut.largest)
        chunk.start, chunk.within = start, {"indices": cut.at, "values": cut.largest}
        return chunk


class SparseReader(AddsByPieces):
    """Sequential decoding; holds the stored values of a piece."""

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        self._stored = Placed(tensor, "indices", "values")
        self._next = 0

    def fill(self, out: Array) -> None:
        flat = out.reshape(-1)
        for start in range(0, flat.size, PIECE):
            piece = flat[start : start + PIECE]
            piece.view(np.uint8).fill(0)
            for positions, values in self._stored.until(self._next + piece.size):
                place(positions - self._next, values, piece, self._name)
            self._next += piece.size

    def add(self, piece: Addition) -> None:
        start, stop = self._next, self._next + piece.base.size
        for positions, values in self._stored.until(stop):
            self._add(piece, start, int(positions[-1]) + 1, (positions, values))
        self._add(piece, start, stop, _NONE)

    def _add(self, piece: Addition, start: int, stop: int, stored: tuple[Array, Array]) -> None:
        """Add what is stored before element ``stop`` of the tensor to a piece that begins at ``start``."""
        target, (positions, values) = piece.part(self._next - start, stop - start), stored
        native.kernels.placed_add(positions, self._next, values, *target.arguments)
        self._next = stop

    def skip(self, count: int) -> None:
        """Pass over ``count`` differences."""
        self._stored.skip(self._next + count)
        self._next += count

    def finish(self) -> None:
        self._stored.finish()


class DeltaSparse(Codec):
    """Positions and float32 values of the largest differences; what is not stored is 0."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    checks_stored: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``delta_sparse.dtype``, ``.parts``, ``.part-dtype``, ``.size``."""
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
        """Yield the differences that are stored; errors as ``decode``."""
        self.check(tensor)
        placed = Placed(tensor, "indices", "values")
        for _, values in placed.until(tensor.size):
            yield values
        placed.finish()

    def encoder(
        self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]
    ) -> SparseEncoder | StreamedSparseEncoder:
        """Prepare to encode. Option ``sparsity``, the share of differences that is dropped (0.9)."""
        require_options(self.id, options, ("sparsity",))
        require_source(self.id, dtype)
        sparsity = share_option(self.id, options, "sparsity", 0.9, below=0)
        size = prod(shape)
        count = kept(size, sparsity)
        parts = (PartSpec("indices", "i64", 8 * count), PartSpec("values", "f32", 4 * count))
        known: dict[str, Any] = {"size": size, "count": count, "parts": parts, "params": {"sparsity": sparsity}}
        if streams(size):
            return StreamedSparseEncoder(**known, step=grid_of(*matrix_rows(shape)))
        return SparseEncoder(**known)
