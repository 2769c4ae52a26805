"""The view of matrices with their rows and columns in each other's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ingot.codecs.affine.windows import ComputedRows, Windows, computed_part
from ingot.codecs.blocks.from_blocks import unpack_blocks
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, file_bytes, numpy_dtype
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import (
    CODES,
    PER_TENSOR,
    ROW,
    ROWS_LSB,
    SCALES,
    ZEROS,
    AffineLayout,
    Blocks,
    Grid,
    Group,
)
from ingot.model.layouts.alternatives import UNPACKED
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor
from ingot.views.common import Make, require_known, view_of
from ingot.views.turn_bytes import HELD, turned_bytes


def turn(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with some matrices turned, under other names: columns become rows, in stacks too.

    Codes of a codec that can state that they are stored the other way round stay as they lie, integers that have scales
    for neighbours in a column are turned, with their scales. A dense matrix is read
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
        return lambda: turned_matrix(checkpoint[name], names[name])

    entries = [(names.get(name, name), turned(name) if name in names else None, name) for name in checkpoint]
    aliases = {new: checkpoint.aliases.get(name, name) for name, new in names.items()}
    return view_of(checkpoint, entries, turn, dict(names), aliases=aliases)


def turned_matrix(tensor: Tensor, name: str) -> Tensor:
    """Return a matrix, or a stack of them, turned; as ``turn``."""
    shape, row = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), DTYPES[tensor.dtype]
    flipped = turned_codes(tensor) or _flipped(tensor)
    if flipped is not None:
        return replace(flipped, name=name, shape=shape, origin=None)
    columns = _Columns(tensor)
    first = next(iter(tensor.parts.values()))
    width = shape[-1] * row.bits // 8
    source = ComputedRows(first.source, prod(shape[:-1]), width, columns.read, HELD, columns.held)
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{name}: {DATA}")
    codec = CODECS[DenseLayout.codec]
    told = "" if tensor.codec == DenseLayout.codec else tensor.codec
    made = Tensor(name, shape, row.name, DenseLayout.codec, {DATA: part}, {}, codec, decoded_from=told)
    return replace(made, source_bits=tensor.source_bits)


def _flipped(tensor: Tensor) -> Tensor | None:
    """Return the same codes as those of a matrix that is stored the other way round; None where nothing can say so."""
    apart: Tensor | None = tensor
    if tensor.codec == GgmlBlocksLayout.codec and isinstance(
        UNPACKED.get(GgmlBlocksLayout.from_tensor(tensor).type), ScaledCodebookLayout
    ):
        apart = unpack_blocks(tensor)
    if apart is None or apart.codec != ScaledCodebookLayout.codec:
        return None
    layout = ScaledCodebookLayout.from_tensor(apart)
    return replace(apart, params=replace(layout, transposed=not layout.transposed).attributes())


def turned_codes(tensor: Tensor) -> Tensor | None:
    """Return the integers or the FP8 numbers of a matrix turned, some columns at a time; None where it has none, or
    where rows would share scales otherwise."""
    return turned_bytes(tensor) if tensor.codec == ScaledCodebookLayout.codec else turned_integers(tensor)


def turned_integers(tensor: Tensor) -> Tensor | None:
    """Return the integers of a matrix turned, some columns at a time; None where rows would share scales otherwise.

    Those that have a scale for some neighbouring rows of a column, for each column, or for the matrix, get a scale for
    groups of a row, a row, or the matrix.
    """
    if tensor.codec != AffineLayout.codec or len(tensor.shape) != 2 or not tensor.size:
        return None
    layout, (rows, cols) = AffineLayout.from_tensor(tensor), tensor.shape
    grid = _turned_grid(layout, rows, cols)
    whole = rows * layout.bits % 8 == 0 and cols * layout.bits % 8 == 0
    aligned = 8 % layout.bits == 0 and layout.is_flat(tensor.shape) and whole
    if grid is None or not aligned or any(part.encoding != "raw" for part in tensor.parts.values()):
        return None
    CODECS[tensor.codec].check(tensor)
    made = replace(layout, grid=grid, packing=ROWS_LSB, matrix=None)
    per_byte = 8 // layout.bits
    window = Windows(tensor.parts[CODES], rows, cols // per_byte)

    def codes(first: int, last: int) -> Array:
        begin = first // per_byte
        end = -(-last // per_byte)
        held = window.read(slice(0, rows), begin, end)
        lanes = [held >> (layout.bits * lane) & ((1 << layout.bits) - 1) for lane in range(per_byte)]
        columns = np.stack(lanes, axis=2).reshape(rows, -1).T[first - per_byte * begin : last - per_byte * begin]
        packed = np.zeros((last - first, rows // per_byte), np.uint8)
        for lane in range(per_byte):
            packed |= columns[:, lane::per_byte] << (layout.bits * lane)
        return packed

    stored = tensor.parts[CODES]
    source = ComputedRows(stored.source, cols, rows // per_byte, codes, HELD)
    parts = {CODES: Part("u8", source.size, source, where=stored.where)}
    size = DTYPES[layout.scales].bits // 8
    count = layout.scale_count(tensor.shape)
    across = 1 if layout.per_tensor else count // cols
    for role in (SCALES, ZEROS) if layout.zeros else (SCALES,):
        if layout.per_tensor:
            parts[role] = tensor.parts[role]
            continue
        numbers = Windows(tensor.parts[role], across, cols * size)
        parts[role] = computed_part(
            tensor.parts[role], layout.scales, cols, across * size, _turner(numbers, across, size)
        )
    return replace(tensor, shape=(cols, rows), parts=parts, params=made.attributes(), origin=None)


def _turner(numbers: Windows, across: int, size: int) -> Callable[[int, int], Array]:
    def turn(first: int, last: int) -> Array:
        held = np.ascontiguousarray(numbers.read(slice(0, across), first * size, last * size))
        return np.ascontiguousarray(held.view(f"u{size}").T)

    return turn


def _turned_grid(layout: AffineLayout, rows: int, cols: int) -> Grid | None:
    """Return what shares a scale in the turned matrix; None where that is no group of a row."""
    if layout.per_tensor:
        return PER_TENSOR
    if not isinstance(layout.grid, Blocks) or layout.grid.shape[1] != 1 or cols == 1:
        return None
    return ROW if layout.grid.shape[0] == rows else Group(layout.grid.shape[0])


class _Columns:
    """Columns of matrices as rows, in the bytes that files have."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._size = DTYPES[tensor.dtype].bits // 8
        self._rows, self._cols = tensor.shape[-2:]
        self._windows: Windows | None = None
        self._values: tuple[int, Array] | None = None
        part = tensor.parts.get(DATA)
        if tensor.codec == DenseLayout.codec and part is not None and part.encoding == "raw":
            CODECS[DenseLayout.codec].check(tensor)
            self._windows = Windows(replace(part), tensor.matrix_shape[0], self._cols * self._size)

    @property
    def held(self) -> int:
        """Bytes of the values of one matrix, where it has to be decoded."""
        return 0 if self._windows is not None else self._rows * self._cols * self._size

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
