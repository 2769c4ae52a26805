"""A view that transposes matrices."""

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
from ingot.views.common import BuildTensor, require_names, view_of
from ingot.views.transpose_fp8 import COLUMN_BYTES, transpose_fp8


def transpose(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with some matrices transposed, under new names; in a stack, each matrix is transposed.

    If the layout has a flag for transposed storage, only the flag changes. Integers whose scales are shared down a
    column are transposed with their scales. A dense matrix is read in groups of columns. A matrix that must be decoded
    is in memory while it is read, one matrix of a stack at a time.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.name``, ``view.delta``; ``view.shape``: no numeric matrix that can be decoded.
    """
    require_names(checkpoint, names)
    for name in names:
        tensor = checkpoint[name]
        row = DTYPES.get(tensor.dtype)
        if len(tensor.shape) < 2 or row is None or row.bits < 8 or tensor.decoder is None:
            raise UsageError(
                f"expected a matrix of numbers, found {tensor.dtype} {list(tensor.shape)}",
                rule="view.shape",
                where=name,
            )

    def builder(name: str) -> BuildTensor:
        return lambda: transpose_matrix(checkpoint[name], names[name])

    entries = [(names.get(name, name), builder(name) if name in names else None, name) for name in checkpoint]
    aliases = {new: checkpoint.aliases.get(name, name) for name, new in names.items()}
    return view_of(checkpoint, entries, transpose, dict(names), aliases=aliases)


def transpose_matrix(tensor: Tensor, name: str) -> Tensor:
    """Return a matrix, or each matrix of a stack, transposed under the name ``name``; see ``transpose``."""
    shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    row = DTYPES[tensor.dtype]
    unchanged_codes = transpose_codes(tensor) or _with_transposed_flag(tensor)
    if unchanged_codes is not None:
        return replace(unchanged_codes, name=name, shape=shape, origin=None)
    columns = _Columns(tensor)
    first = next(iter(tensor.parts.values()))
    width = shape[-1] * row.bits // 8
    source = ComputedRows(first.source, prod(shape[:-1]), width, columns.read, COLUMN_BYTES, columns.cached_bytes)
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{name}: {DATA}")
    codec = CODECS[DenseLayout.codec]
    original_codec = "" if tensor.codec == DenseLayout.codec else tensor.codec
    transposed = Tensor(name, shape, row.name, DenseLayout.codec, {DATA: part}, {}, codec, decoded_from=original_codec)
    return replace(transposed, source_bits=tensor.source_bits)


def _with_transposed_flag(tensor: Tensor) -> Tensor | None:
    """Return the tensor with the flag ``transposed`` of its layout inverted; None if its codec has no such flag."""
    unpacked: Tensor | None = tensor
    if tensor.codec == GgmlBlocksLayout.codec and isinstance(
        UNPACKED.get(GgmlBlocksLayout.from_tensor(tensor).type), ScaledCodebookLayout
    ):
        unpacked = unpack_blocks(tensor)
    if unpacked is None or unpacked.codec != ScaledCodebookLayout.codec:
        return None
    layout = ScaledCodebookLayout.from_tensor(unpacked)
    return replace(unpacked, params=replace(layout, transposed=not layout.transposed).attributes())


def transpose_codes(tensor: Tensor) -> Tensor | None:
    """Return a matrix of integers or FP8 numbers transposed without decoding, computed by groups of columns.

    Returns None for another codec, or if this is impossible (``transpose_integers``, ``transpose_fp8``).
    """
    return transpose_fp8(tensor) if tensor.codec == ScaledCodebookLayout.codec else transpose_integers(tensor)


def transpose_integers(tensor: Tensor) -> Tensor | None:
    """Return a matrix of integers transposed without decoding, or None for unsupported arrangements of scales.

    The source must have a scale per block of neighbouring rows in a column, per column, or per matrix. The result has a
    scale per group of a row, per row, or per matrix. It is computed by groups of columns.
    """
    if tensor.codec != AffineLayout.codec or len(tensor.shape) != 2 or not tensor.size:
        return None
    layout = AffineLayout.from_tensor(tensor)
    rows, cols = tensor.shape
    grid = _transposed_grid(layout, rows, cols)
    fills_bytes = rows * layout.bits % 8 == 0 and cols * layout.bits % 8 == 0
    aligned = 8 % layout.bits == 0 and layout.is_flat(tensor.shape) and fills_bytes
    if grid is None or not aligned or any(part.encoding != "raw" for part in tensor.parts.values()):
        return None
    CODECS[tensor.codec].check(tensor)
    transposed_layout = replace(layout, grid=grid, packing=ROWS_LSB, matrix=None)
    per_byte = 8 // layout.bits
    window = Windows(tensor.parts[CODES], rows, cols // per_byte)

    def codes(first: int, last: int) -> Array:
        begin = first // per_byte
        end = -(-last // per_byte)
        stored_codes = window.read(slice(0, rows), begin, end)
        lanes = [stored_codes >> (layout.bits * lane) & ((1 << layout.bits) - 1) for lane in range(per_byte)]
        columns = np.stack(lanes, axis=2).reshape(rows, -1).T[first - per_byte * begin : last - per_byte * begin]
        packed = np.zeros((last - first, rows // per_byte), np.uint8)
        for lane in range(per_byte):
            packed |= columns[:, lane::per_byte] << (layout.bits * lane)
        return packed

    stored = tensor.parts[CODES]
    source = ComputedRows(stored.source, cols, rows // per_byte, codes, COLUMN_BYTES)
    parts = {CODES: Part("u8", source.size, source, where=stored.where)}
    size = DTYPES[layout.scales].bits // 8
    count = layout.scale_count(tensor.shape)
    across = 1 if layout.per_tensor else count // cols
    for role in (SCALES, ZEROS) if layout.zeros else (SCALES,):
        if layout.per_tensor:
            parts[role] = tensor.parts[role]
            continue
        windows = Windows(tensor.parts[role], across, cols * size)
        parts[role] = computed_part(
            tensor.parts[role], layout.scales, cols, across * size, _transposed_reader(windows, across, size)
        )
    return replace(tensor, shape=(cols, rows), parts=parts, params=transposed_layout.attributes(), origin=None)


def _transposed_reader(windows: Windows, across: int, size: int) -> Callable[[int, int], Array]:
    def read(first: int, last: int) -> Array:
        stored = np.ascontiguousarray(windows.read(slice(0, across), first * size, last * size))
        return np.ascontiguousarray(stored.view(f"u{size}").T)

    return read


def _transposed_grid(layout: AffineLayout, rows: int, cols: int) -> Grid | None:
    """Return the grid of scales of the transposed matrix, or None if its scales would not belong to groups of a row."""
    if layout.per_tensor:
        return PER_TENSOR
    if not isinstance(layout.grid, Blocks) or layout.grid.shape[1] != 1 or cols == 1:
        return None
    return ROW if layout.grid.shape[0] == rows else Group(layout.grid.shape[0])


class _Columns:
    """The columns of a tensor's matrices, as rows of bytes in the byte order of files."""

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
    def cached_bytes(self) -> int:
        """The number of bytes of one decoded matrix; 0 if the matrix is dense and read by columns."""
        return 0 if self._windows is not None else self._rows * self._cols * self._size

    def read(self, first: int, last: int) -> Array:
        """Return columns ``first`` to ``last`` as rows of bytes, counted through all matrices of a stack."""
        blocks = [
            self._read(matrix, max(first - matrix * self._cols, 0), min(last - matrix * self._cols, self._cols))
            for matrix in range(first // self._cols, -(-last // self._cols))
        ]
        return blocks[0] if len(blocks) == 1 else np.concatenate([block.reshape(-1).view(np.uint8) for block in blocks])

    def _read(self, matrix: int, first: int, last: int) -> Array:
        if self._windows is not None:
            rows = slice(matrix * self._rows, (matrix + 1) * self._rows)
            stored = self._windows.read(rows, first * self._size, last * self._size)
            word = np.dtype(f"u{self._size}") if self._size <= 8 else np.dtype("c16")
            return np.ascontiguousarray(np.ascontiguousarray(stored).view(word).T)
        if self._values is None or self._values[0] != matrix:
            stacked = len(self._tensor.shape) > 2
            index = np.unravel_index(matrix, self._tensor.shape[:-2]) if stacked else ()
            values = self._tensor[tuple(int(i) for i in index)] if stacked else self._tensor.numpy(self._tensor.dtype)
            self._values = (matrix, values)
        decoded = self._values[1]
        columns = np.ascontiguousarray(decoded[:, first:last].T).astype(numpy_dtype(self._tensor.dtype), copy=False)
        if last == self._cols:
            self._values = None
        return np.frombuffer(file_bytes(columns), np.uint8)
