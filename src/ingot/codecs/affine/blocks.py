"""Keys and values of attention as blocks of affine codes: appended to, never packed again (``spec/kv-cache.md``)."""

from __future__ import annotations

from copy import copy

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.tensor import Array

BITS = (2, 4, 8)
MOST = 1024
"""Rows, and columns, of a block."""
LANES = 16
"""Columns of a block, and those of a group, come in as many."""

_NON_FINITE = 1
_SLACK = 8  # room for one block more in so many


class PackedBlocks:
    """Blocks [rows, cols] of so many heads: codes in rows, an f16 scale and offset for each group of a row's columns.

    Blocks of keys are [channels, tokens] in one group, those of values [tokens, channels] in groups of channels.

    Parameters
    ----------
    heads : int
        Of all sequences.
    shape : rows, cols
        Of a block; columns in sixteens, at most ``MOST`` of either.
    bits : 2, 4 or 8
    group : int
        Columns that share a scale, in sixteens; the last group of a row may be shorter.
    """

    def __init__(self, heads: int, shape: tuple[int, int], bits: int, group: int) -> None:
        self.heads, self.shape, self.bits, self.group = heads, shape, bits, group
        rows, cols = shape
        self.count = 0
        self._packed: Array = np.empty((heads, 0, rows, cols * bits // 8), np.uint8)
        self._scales: Array = np.empty((heads, 0, rows, -(-cols // group)), np.uint16)
        self._zeros: Array = self._scales

    @property
    def nbytes(self) -> int:
        """Bytes held, with room for the next blocks."""
        return int(self._packed.nbytes + 2 * self._scales.nbytes)

    def snapshot(self) -> PackedBlocks:
        """Return these blocks as they are now: what is appended later is not among them, and nothing is copied."""
        return copy(self)

    def pack(self, values: Array) -> tuple[Array, Array, Array]:
        """Return blocks [heads, blocks, rows, cols] in f32, f16 or bf16, each packed by itself, for ``put``.

        Raises
        ------
        CodecError
            ``kv.range``: values that are not finite, or of which f16 cannot hold the smallest or the step.
        """
        heads, count, _, cols = values.shape
        made: list[Array] = [
            np.empty((heads, count, *held.shape[2:]), held.dtype) for held in (self._packed, self._scales, self._zeros)
        ]
        packed, scales, zeros = made
        kind, index = native.kernels.affine_quantize(
            as_bits(values).reshape(-1, cols),
            float_name(values),
            packed.reshape(-1),
            scales.reshape(-1),
            zeros.reshape(-1),
            self._layout(),
            "f16",
            "range",
        )
        if kind:
            row, column = divmod(index, cols)
            found = values.reshape(-1, cols)[row].astype(np.float64)
            what = f"{found[column]:g}" if kind == _NON_FINITE else f"up to {np.abs(found).max():g}"
            raise CodecError(
                "kv.range",
                f"expected keys and values that are finite and that f16 has offsets for, at most 65504, found {what}: "
                "run the model with the full cache",
            )
        return packed, scales, zeros

    def put(self, packed: tuple[Array, Array, Array]) -> None:
        """Append what ``pack`` returned; nothing that is here changes."""
        count = packed[0].shape[1]
        self._make_room(count)
        last = self.count + count
        for held, new in zip((self._packed, self._scales, self._zeros), packed, strict=True):
            held[:, self.count : last] = new
        self.count = last

    def decode(self, dtype: str) -> Array:
        """Return the values, [heads, blocks, rows, cols] in f32, f16 or bf16, each rounded once."""
        rows, cols = self.shape
        out = np.empty((self.heads, self.count, rows, cols), numpy_dtype(dtype))
        packed, scales, zeros = (
            np.ascontiguousarray(held[:, : self.count]).reshape(-1)
            for held in (self._packed, self._scales, self._zeros)
        )
        flat = out.reshape(-1, cols)
        native.kernels.affine_dequantize(packed, scales, zeros, written(flat), self._layout(), "f16", dtype)
        return out

    def scores(self, queries: Array, out: Array, first: int, workers: int) -> None:
        """Write products of queries [heads, n, rows] with all columns to ``out`` [heads, n, tokens], from ``first`` on.

        Both are f32. The columns of all blocks follow each other: these are blocks of keys.
        """
        native.kernels.kv_scores(
            queries, self._packed, self._scales, self._zeros, self.count, self.bits, out, first, workers
        )

    def weighted(self, weights: Array, first: int, out: Array, workers: int) -> None:
        """Write rows summed by ``weights`` [heads, n, tokens], from token ``first`` on, to ``out`` [heads, n, cols].

        Both are f32. The rows of all blocks follow each other: these are blocks of values.
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
        """Keep the heads of these indices, in their order; one may be there several times."""
        self._packed, self._scales, self._zeros = (
            np.take(held, heads, axis=0) for held in (self._packed, self._scales, self._zeros)
        )
        self.heads = len(heads)

    def drop(self, first: int) -> None:
        """Forget the first blocks."""
        self._packed, self._scales, self._zeros = (
            held[:, first : self.count].copy() for held in (self._packed, self._scales, self._zeros)
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
        held = (self._packed, self._scales, self._zeros)
        larger = [np.zeros((self.heads, capacity, *each.shape[2:]), each.dtype) for each in held]
        for each, new in zip(held, larger, strict=True):
            new[:, : self.count] = each[:, : self.count]
        self._packed, self._scales, self._zeros = larger
