"""The view of matrices with their rows and columns in each other's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ingot.codecs.affine.windows import MadeSource, Windows
from ingot.codecs.blocks.from_blocks import taken_apart
from ingot.codecs.table import CODECS
from ingot.core.dtypes import DTYPES, file_bytes, numpy_dtype
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.families import OWN
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor
from ingot.ops.views.common import Make, require_known, view_of

_HELD = 1 << 26  # bytes of columns that are read at a time: each column is a journey through the whole matrix


def turn(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with some matrices turned, under other names: columns become rows, in stacks too.

    Codes of a codec that can state that they are stored the other way round stay as they lie. A dense matrix is read
    column by column, some at a time; what has to be decoded is held whole while it is read, of a stack one matrix.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``, ``view.delta``; ``view.shape``: no matrix of numbers that can be decoded.
    """
    require_known(checkpoint, names)
    for name in names:
        tensor = checkpoint[name]
        row = DTYPES.get(tensor.dtype)
        if len(tensor.shape) < 2 or row is None or row.bits < 8 or tensor.decoder is None:
            raise UsageError(
                f"expected a matrix of numbers, found {tensor.dtype} {list(tensor.shape)}",
                rule="view.shape",
                where=name,
            )

    def turned(name: str) -> Make:
        return lambda: _turned(checkpoint[name], names[name])

    entries = [(names.get(name, name), turned(name) if name in names else None, name) for name in checkpoint]
    view = view_of(checkpoint, entries, turn, dict(names))
    called = {name: checkpoint.called.get(name, name) for name in names}
    view.called = {**view.called, **{names[name]: told for name, told in called.items()}}
    return view


def _turned(tensor: Tensor, name: str) -> Tensor:
    shape, row = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), DTYPES[tensor.dtype]
    flipped = _flipped(tensor)
    if flipped is not None:
        return replace(flipped, name=name, shape=shape, origin=None)
    columns = _Columns(tensor)
    first = next(iter(tensor.parts.values()))
    source = MadeSource(first.source, prod(shape[:-1]), shape[-1] * row.bits // 8, columns.read, _HELD)
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{name}: {DATA}")
    codec = CODECS[DenseLayout.codec]
    told = "" if tensor.codec == DenseLayout.codec else tensor.codec
    return Tensor(name, shape, row.name, DenseLayout.codec, {DATA: part}, {}, codec, decoded_from=told)


def _flipped(tensor: Tensor) -> Tensor | None:
    """Return the same codes as those of a matrix that is stored the other way round; None where nothing can say so."""
    apart: Tensor | None = tensor
    if tensor.codec == GgmlBlocksLayout.codec and isinstance(
        OWN.get(GgmlBlocksLayout.of(tensor).type), ScaledCodebookLayout
    ):
        apart = taken_apart(tensor)
    if apart is None or apart.codec != ScaledCodebookLayout.codec:
        return None
    layout = ScaledCodebookLayout.of(apart)
    return replace(apart, params=replace(layout, transposed=not layout.transposed).attributes())


class _Columns:
    """Columns of matrices as rows, in the bytes that files have."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._size = tensor, DTYPES[tensor.dtype].bits // 8
        self._rows, self._cols = tensor.shape[-2:]
        self._windows: Windows | None = None
        self._values: tuple[int, Array] | None = None
        part = tensor.parts.get(DATA)
        if tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw":
            CODECS[DenseLayout.codec].check(tensor)
            self._windows = Windows(replace(part), tensor.matrix_shape[0], self._cols * self._size)

    def read(self, first: int, last: int) -> Array:
        """Return columns ``first`` to ``last``, counted through all matrices, one behind the other."""
        pieces = [
            self._read(matrix, max(first - matrix * self._cols, 0), min(last - matrix * self._cols, self._cols))
            for matrix in range(first // self._cols, -(-last // self._cols))
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([piece.reshape(-1).view(np.uint8) for piece in pieces])

    def _read(self, matrix: int, first: int, last: int) -> Array:
        if self._windows is not None:
            rows = slice(matrix * self._rows, (matrix + 1) * self._rows)
            stored = self._windows.read(rows, first * self._size, last * self._size)
            kind = np.dtype(f"u{self._size}") if self._size <= 8 else np.dtype("c16")
            return np.ascontiguousarray(np.ascontiguousarray(stored).view(kind).T)
        if self._values is None or self._values[0] != matrix:
            stacked = len(self._tensor.shape) > 2
            index = np.unravel_index(matrix, self._tensor.shape[:-2]) if stacked else ()
            whole = self._tensor[tuple(int(i) for i in index)] if stacked else self._tensor.numpy(self._tensor.dtype)
            self._values = (matrix, whole)
        values = self._values[1]
        piece = np.ascontiguousarray(values[:, first:last].T).astype(numpy_dtype(self._tensor.dtype), copy=False)
        if last == self._cols:
            self._values = None
        return np.frombuffer(file_bytes(piece), np.uint8)
