"""The view of matrices with their rows and columns in each other's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ingot.codecs.affine.windows import MadeSource, Windows
from ingot.codecs.table import CODECS
from ingot.core.dtypes import DTYPES, file_bytes, numpy_dtype
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor
from ingot.ops.views.common import Make, require_known, view_of

_HELD = 1 << 26  # bytes of columns that are read at a time: each column is a journey through the whole matrix


def turn(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with some matrices turned, under other names: columns become rows.

    A dense matrix is read column by column, some at a time; what has to be decoded is held whole while it is read.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``, ``view.delta``; ``view.shape``: no matrix of numbers that can be decoded.
    """
    require_known(checkpoint, names)
    for name in names:
        tensor = checkpoint[name]
        row = DTYPES.get(tensor.dtype)
        if len(tensor.shape) != 2 or row is None or row.bits < 8 or tensor.decoder is None:
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
    view.called = {**checkpoint.called, **{names[name]: told for name, told in called.items()}}
    return view


def _turned(tensor: Tensor, name: str) -> Tensor:
    (rows, cols), row = tensor.shape, DTYPES[tensor.dtype]
    columns = _Columns(tensor)
    first = next(iter(tensor.parts.values()))
    source = MadeSource(first.source, cols, rows * row.bits // 8, columns.read, _HELD)
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{name}: {DATA}")
    codec = CODECS[DenseLayout.codec]
    return Tensor(name, (cols, rows), row.name, DenseLayout.codec, {DATA: part}, {}, codec)


class _Columns:
    """Columns of a matrix as rows, in the bytes that files have."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._size = tensor, DTYPES[tensor.dtype].bits // 8
        self._cols = tensor.shape[1]
        self._windows: Windows | None = None
        self._values: Array | None = None
        part = tensor.parts.get(DATA)
        if tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw":
            CODECS[DenseLayout.codec].check(tensor)
            self._windows = Windows(replace(part), tensor.shape[0], self._cols * self._size)

    def read(self, first: int, last: int) -> Array:
        """Return columns ``first`` to ``last``, one behind the other."""
        if self._windows is not None:
            stored = self._windows.read(slice(0, self._windows.rows), first * self._size, last * self._size)
            kind = np.dtype(f"u{self._size}") if self._size <= 8 else np.dtype("c16")
            return np.ascontiguousarray(np.ascontiguousarray(stored).view(kind).T)
        if self._values is None:
            self._values = self._tensor.numpy(self._tensor.dtype)
        piece = np.ascontiguousarray(self._values[:, first:last].T).astype(numpy_dtype(self._tensor.dtype), copy=False)
        if last == self._cols:
            self._values = None
        return np.frombuffer(file_bytes(piece), np.uint8)
