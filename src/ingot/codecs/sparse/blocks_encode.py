"""Encoding of ``sparse_blocks``: another codec's encoder stores the remaining rows or columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ingot.codecs.base import ChunkParts, Encoder, is_int_between, option_error, require_known, row_step
from ingot.codecs.table import CODECS
from ingot.core.numeric.blocks import Blocks, block_count, clip_spans, mask_bytes
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UnsupportedError
from ingot.model.layouts.base import OtherLayout, resolve_codec
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.sparse import BlocksLayout, stored_shape
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

OPTIONS = ("axis", "block", "mask", "inner", "options", "whole")
BLOCK = 64
_option_error = partial(option_error, BlocksLayout.codec)


@dataclass(slots=True)
class BlocksEncoder(Encoder):
    """An encoder that passes the remaining elements of each chunk to an inner encoder. The mask comes with row 0."""

    rows: int
    axis: int
    blocks: Blocks
    inner: Encoder
    dtype: str
    parts: tuple[PartSpec, ...]
    step: int
    single_chunk: bool
    full_size: bool = False
    codec: str = BlocksLayout.codec
    _spans: list[tuple[int, int]] = field(default_factory=list)
    _scanned: int = 0

    def __post_init__(self) -> None:
        self._spans = self.blocks.spans()

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters that the file declares; after fit passes they include the results of the inner encoder."""
        inner = OtherLayout(self.inner.codec, self.inner.params)
        blocks = self.blocks
        return BlocksLayout(
            self.dtype, self.axis, blocks.block, blocks.channels, blocks.kept_channels, inner, self.full_size
        ).attributes()

    @property
    def fit_passes(self) -> int:
        return self.inner.fit_passes

    @property
    def lossless(self) -> bool:
        return self.inner.lossless and self.blocks.kept_channels == self.blocks.channels

    def retained_bytes(self) -> int:
        return self.inner.retained_bytes()

    def ready(self) -> None:
        self.inner.ready()

    def observes(self) -> bool:
        return self.inner.observes()

    def observe(self, rows: Array, start: int) -> bool:
        return self.inner.observe(self._remaining(rows, start), self._before(start))

    def wider_options(self) -> Mapping[str, Any]:
        inner = self.inner.wider_options()
        return {"options": inner} if inner else {}

    def underflow(self) -> str | None:
        return self.inner.underflow()

    def forget(self) -> None:
        self.inner.forget()

    def fit_pass(self, rows: Array) -> None:
        start = self._scanned
        remaining = self._remaining(rows, self._scanned)
        self._scanned = (start + len(rows)) % max(self.rows, 1)
        if self._is_for_inner(remaining, start):
            self.inner.fit_pass(remaining)

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``.

        A chunk without remaining rows has no inner parts. If the tensor has no remaining rows, the first chunk has the
        inner parts of an empty matrix.
        """
        remaining = self._remaining(rows, start)
        chunk = ChunkParts(mask=np.frombuffer(self.blocks.mask if start == 0 else b"", np.uint8))
        chunk.start = start
        if self._is_for_inner(remaining, start):
            chunk.within = self.inner.encode(remaining, self._before(start))
        else:
            chunk.within = {part.role: np.empty(0, numpy_dtype(part.dtype)) for part in self.parts[1:]}
        chunk.update(chunk.within)
        return chunk

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        """Decode the parts that ``encode`` returned for one chunk.

        The index of the chunk's first row, ``parts.start``, determines which of its rows are stored.
        """
        start = parts.start if isinstance(parts, ChunkParts) else 0
        within = parts.within if isinstance(parts, ChunkParts) else {k: v for k, v in parts.items() if k != "mask"}
        if self.full_size:
            self.inner.decode(within, out)
            self._clear(out, start)
            return
        if out.size:
            out[...] = np.zeros((), out.dtype)
        spans = self._spans if self.axis else clip_spans(self._spans, start, start + len(out))
        count = sum(last - first for first, last in spans)
        if not count or not len(out):
            return
        remaining = np.empty((len(out), count) if self.axis else (count, out.shape[1]), out.dtype)
        self.inner.decode(within, remaining)
        position = 0
        for first, last in spans:
            if self.axis:
                out[:, first:last] = remaining[:, position : position + last - first]
            else:
                out[first - start : last - start] = remaining[position : position + last - first]
            position += last - first

    def _is_for_inner(self, remaining: Array, start: int) -> bool:
        """Return whether the inner encoder gets a chunk.

        It does if the chunk has remaining rows, or if it is the first one and the tensor has no remaining rows.
        """
        return len(remaining) > 0 or (start == 0 and self._before(self.rows) == 0)

    def _before(self, row: int) -> int:
        """Return the number of stored rows before ``row``."""
        if self.axis or self.full_size:
            return row
        return sum(last - first for first, last in clip_spans(self._spans, 0, row))

    def _clear(self, rows: Array, start: int) -> None:
        """Set the dropped elements of rows from ``start`` on to +0."""
        selected = np.zeros(rows.shape[1] if self.axis else len(rows), bool)
        for first, last in self._spans if self.axis else clip_spans(self._spans, start, start + len(rows)):
            selected[first if self.axis else first - start : last if self.axis else last - start] = True
        rows[(slice(None), ~selected) if self.axis else ~selected] = np.zeros((), rows.dtype)

    def _remaining(self, rows: Array, start: int) -> Array:
        if self.full_size:
            rows = rows.copy()
            self._clear(rows, start)
            return rows
        if self.axis:
            return _join([rows[:, first:last] for first, last in self._spans], rows, 1)
        spans = clip_spans(self._spans, start, start + len(rows))
        return _join([rows[first - start : last - start] for first, last in spans], rows, 0)


def _join(slices: list[Array], rows: Array, axis: int) -> Array:
    """Return the slices as one matrix in C order, without a copy if there is one contiguous slice."""
    if len(slices) == 1:
        return np.ascontiguousarray(slices[0])
    empty = rows[:0] if axis == 0 else rows[:, :0]
    return np.concatenate(slices, axis=axis) if slices else np.ascontiguousarray(empty)


def prepare(shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> BlocksEncoder:
    """Return the encoder for a matrix of ``shape`` and source ``dtype``; see ``BlocksCodec.encoder``."""
    require_known(BlocksLayout.codec, options, OPTIONS)
    axis = options.get("axis", 0)
    block = options.get("block", BLOCK)
    if axis not in (0, 1) or isinstance(axis, bool):
        raise _option_error("axis 0 or 1", axis)
    if not is_int_between(block, 1, 2**62):
        raise _option_error("block of at least 1", block)
    if len(shape) != 2:
        raise UnsupportedError(
            f"sparse_blocks stores matrices, found shape {list(shape)}; keep this tensor dense",
            rule="sparse_blocks.shape",
        )
    blocks = _blocks(shape[axis], block, options.get("mask"))
    name = resolve_codec(options.get("inner", DenseLayout.codec))
    inner_options = options.get("options", {})
    if name == "sparse_blocks" or not isinstance(name, str) or name not in CODECS or not CODECS[name].streams:
        raise UnsupportedError(
            f"sparse_blocks expects an inner codec that can be read in chunks, found {name!r}",
            rule="sparse_blocks.inner",
        )
    if not isinstance(inner_options, Mapping):
        raise _option_error("options as a map", inner_options)
    full_size = options.get("whole", False)
    if not isinstance(full_size, bool):
        raise _option_error("whole true or false", full_size)
    reduced = stored_shape((shape[0], shape[1]), axis, None if full_size else blocks.kept_channels)
    inner = CODECS[name].encoder(reduced, dtype, inner_options)
    if any(part.role == "mask" for part in inner.parts):
        raise UnsupportedError(f"codec {name} already has a part 'mask'", rule="sparse_blocks.inner")
    step = row_step(CODECS[name], inner, reduced[1])
    mask = PartSpec("mask", "u8", mask_bytes(shape[axis], block))
    # Chunks that begin at blocks begin at multiples of the inner step only if a block is a multiple of it.
    fits = axis == 1 or full_size or block % step == 0
    return BlocksEncoder(
        rows=shape[0],
        axis=axis,
        blocks=blocks,
        inner=inner,
        dtype=stored_dtype(inner, dtype),
        parts=(mask, *inner.parts),
        step=step if axis == 1 or full_size or step == 1 else block,
        single_chunk=inner.single_chunk or not fits,
        full_size=full_size,
    )


def stored_dtype(inner: Encoder, default: str) -> str:
    """Return the element type of the values that an encoder stores; ``default`` is the source's type."""
    declared = inner.params.get("dtype")
    if isinstance(declared, str):
        return declared
    return (inner.parts[0].type or inner.parts[0].dtype) if len(inner.parts) == 1 else default


def _blocks(channels: int, block: int, mask: object) -> Blocks:
    if mask is None:
        return Blocks.from_flags(channels, block, [True] * block_count(channels, block))
    if not isinstance(mask, bytes) or len(mask) != mask_bytes(channels, block):
        raise _option_error(f"a mask of {mask_bytes(channels, block)} bytes", mask)
    blocks = Blocks(channels, block, mask)
    if blocks.has_spare_bits:
        raise _option_error("a mask without bits past the last block", mask)
    return blocks
