"""Append-only blocks of affine codes for the keys and values of attention (``spec/kv-cache.md``)."""

from __future__ import annotations

from copy import copy

import numpy as np

from ingot.core.numeric.dtypes import as_bits, float_name, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.tensor import Array

BITS = (2, 4, 8)
MAX_EXTENT = 1024
"""The largest number of rows, and of columns, of a block."""
LANES = 16
"""The columns of a block, and of a group, are multiples of this."""

_NON_FINITE = 1
_SLACK = 8  # when memory is full, it grows by a fraction of the number of blocks: 1 / this


class PackedBlocks:
    """Blocks [rows, cols] for several heads: codes row by row, an f16 scale and an f16 offset per group of columns.

    A block of keys is [channels, tokens]; each of its rows is one group. A block of values is [tokens, channels], with
    groups of channels.

    Parameters
    ----------
    heads : int
        The number of heads of all sequences together.
    shape : rows, cols
        Shape of a block; at most ``MAX_EXTENT`` each, columns a multiple of 16.
    bits : 2, 4 or 8
    group : int
        Columns that share a scale, a multiple of 16; the last group of a row may be shorter.
    """

    def __init__(self, heads: int, shape: tuple[int, int], bits: int, group: int) -> None:
        self.heads = heads
        self.shape = shape
        self.bits = bits
        self.group = group
        rows, cols = shape
        self.count = 0
        self._packed: Array = np.empty((heads, 0, rows, cols * bits // 8), np.uint8)
        self._scales: Array = np.empty((heads, 0, rows, -(-cols // group)), np.uint16)
        self._zeros: Array = self._scales

    @property
    def nbytes(self) -> int:
        """Allocated bytes, including memory for later blocks."""
        return int(self._packed.nbytes + 2 * self._scales.nbytes)

    def snapshot(self) -> PackedBlocks:
        """Return a view of the current blocks without a copy; blocks that are appended later are not in it."""
        return copy(self)

    def pack(self, values: Array) -> tuple[Array, Array, Array]:
        """Return ``values``, [heads, blocks, rows, cols] in f32, f16 or bf16, as packed blocks that ``put`` accepts.

        Each block is packed independently.

        Raises
        ------
        CodecError
            ``kv.range``: a value is not finite, or f16 cannot store a group's smallest value or step.
        """
        heads, count, _, cols = values.shape
        arrays: list[Array] = [
            np.empty((heads, count, *stored.shape[2:]), stored.dtype)
            for stored in (self._packed, self._scales, self._zeros)
        ]
        packed, scales, zeros = arrays
        status, index = native.kernels.affine_quantize(
            as_bits(values).reshape(-1, cols),
            float_name(values),
            packed.reshape(-1),
            scales.reshape(-1),
            zeros.reshape(-1),
            self._layout(),
            "f16",
            "range",
        )
        if status:
            row, column = divmod(index, cols)
            row_values = values.reshape(-1, cols)[row].astype(np.float64)
            reason = f"{row_values[column]:g}" if status == _NON_FINITE else f"up to {np.abs(row_values).max():g}"
            raise CodecError(
                "kv.range",
                f"expected finite keys and values of at most 65504, the largest f16, found {reason}; "
                "run the model with the full cache",
            )
        return packed, scales, zeros

    def put(self, packed: tuple[Array, Array, Array]) -> None:
        """Append the blocks that ``pack`` returned; stored blocks do not change."""
        count = packed[0].shape[1]
        self._make_room(count)
        last = self.count + count
        for stored, new in zip((self._packed, self._scales, self._zeros), packed, strict=True):
            stored[:, self.count : last] = new
        self.count = last

    def decode(self, dtype: str) -> Array:
        """Return the values, [heads, blocks, rows, cols] in f32, f16 or bf16, each rounded once."""
        rows, cols = self.shape
        out = np.empty((self.heads, self.count, rows, cols), numpy_dtype(dtype))
        packed, scales, zeros = (
            np.ascontiguousarray(stored[:, : self.count]).reshape(-1)
            for stored in (self._packed, self._scales, self._zeros)
        )
        flat = out.reshape(-1, cols)
        native.kernels.affine_dequantize(packed, scales, zeros, written(flat), self._layout(), "f16", dtype)
        return out

    def scores(self, queries: Array, out: Array, first: int, workers: int) -> None:
        """Write products of queries [heads, n, rows] and all columns to ``out`` [heads, n, tokens] from ``first`` on.

        Both are f32. The blocks contain keys; the columns of successive blocks are successive tokens.
        """
        native.kernels.kv_scores(
            queries, self._packed, self._scales, self._zeros, self.count, self.bits, out, first, workers
        )

    def weighted_sums(self, weights: Array, first: int, out: Array, workers: int) -> None:
        """Write sums of rows, weighted by ``weights`` [heads, n, tokens] from token ``first`` on, to ``out``.

        ``weights`` and ``out`` [heads, n, cols] are f32. The blocks contain values; the rows of successive blocks are
        successive tokens.
        """
        native.kernels.kv_values(
            weights,
            first,
            self._packed,
            self._scales,
            self._zeros,
            self.count,
            self.bits,
            self.group,
            out,
            workers,
        )

    def take(self, heads: Array) -> None:
        """Select heads by their indices; the blocks are then in the order of ``heads``, which may repeat an index."""
        self._packed, self._scales, self._zeros = (
            np.take(stored, heads, axis=0) for stored in (self._packed, self._scales, self._zeros)
        )
        self.heads = len(heads)

    def drop(self, first: int) -> None:
        """Remove the first ``first`` blocks."""
        self._packed, self._scales, self._zeros = (
            stored[:, first : self.count].copy() for stored in (self._packed, self._scales, self._zeros)
        )
        self.count -= first

    def _layout(self) -> native.kernels.AffineLayout:
        cols = self.shape[1]
        return native.kernels.AffineLayout(
            cols=cols,
            group=self.group,
            bits=self.bits,
            signed=False,
            msb=False,
            per_tensor=False,
            row_bytes=cols * self.bits // 8,
            offset=True,
        )

    def _make_room(self, count: int) -> None:
        needed = self.count + count
        if needed <= self._packed.shape[1]:
            return
        capacity = needed + self.count // _SLACK
        arrays = (self._packed, self._scales, self._zeros)
        larger = [np.zeros((self.heads, capacity, *stored.shape[2:]), stored.dtype) for stored in arrays]
        for stored, new in zip(arrays, larger, strict=True):
            new[:, : self.count] = stored[:, : self.count]
        self._packed, self._scales, self._zeros = larger
