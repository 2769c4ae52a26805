"""``sparse_blocks``: structured pruning; a matrix without some blocks of rows or columns.

Another codec stores the smaller matrix that remains, and a mask marks the remaining blocks (``spec/sparse_blocks.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Repacked, RowReader, Rows, cannot, result
from ingot.codecs.dense.codec import require_part
from ingot.codecs.sparse.blocks_encode import BlocksEncoder, prepare
from ingot.codecs.sparse.blocks_repack import repack as repack_kept
from ingot.codecs.table import CODECS
from ingot.core.numeric.blocks import Blocks, clip_spans, mask_bytes
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError
from ingot.model.layouts.base import Layout, OtherLayout, codec_of
from ingot.model.layouts.sparse import MASK, BlocksLayout
from ingot.model.part import Part, memory_part
from ingot.model.reading.slices import skip_elements
from ingot.model.tensor import Array, Tensor

ID = BlocksLayout.codec


@dataclass(frozen=True, slots=True)
class _Params:
    """The checked attributes of a tensor of codec ``sparse_blocks``."""

    layout: BlocksLayout
    inner: Tensor

    @property
    def codec(self) -> Codec:
        return CODECS[self.inner.codec]


class BlocksReader(Rows):
    """A sequential reader of the inner codec's rows, with zeros in dropped blocks."""

    def __init__(self, tensor: Tensor) -> None:
        params = _checked(tensor)
        self._axis = params.layout.axis
        self._spans = _blocks(tensor, params).spans()
        self._reader: RowReader = params.codec.reader(params.inner)
        self._cols = params.inner.shape[1]
        self._width = tensor.matrix_shape[1]
        self._dtype = numpy_dtype(params.inner.dtype)
        self._full_size = params.layout.full_size
        self._row = 0

    def fill(self, out: Array) -> None:
        start = self._row
        stop = self._row + len(out)
        self._row = stop
        if self._full_size:
            self._reader.read_into(out)
            clear_dropped(out, self._spans, self._axis, start)
            return
        if self._axis:
            read_columns(self._reader, self._spans, self._cols, out)
            return
        filled_to = start
        for first, last in clip_spans(self._spans, start, stop):
            clear(out[filled_to - start : first - start])
            self._reader.read_into(out[first - start : last - start])
            filled_to = last
        clear(out[filled_to - start :])

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        start, stop = self._row, self._row + count // max(self._width, 1)
        self._row = stop
        rows = stop - start
        if not self._axis and not self._full_size:
            rows = sum(last - first for first, last in clip_spans(self._spans, start, stop))
        skip_elements(self._reader, rows * self._cols, self._cols, self._dtype)

    def finish(self) -> None:
        self._reader.finish()


class BlocksCodec(Codec):
    """Structured pruning: the matrix of another codec without some blocks of rows or columns, which decode to zeros."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``sparse_blocks.params``, ``.shape``, ``.inner``,
        ``.part-missing``, ``.size``.

        The inner codec checks its parts too. Readers of the mask check its bytes: rule ``sparse_blocks.mask``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the matrix in any dtype to which the inner codec decodes; dropped elements are zero."""
        params = _checked(tensor)
        blocks = _blocks(tensor, params)
        if params.layout.full_size:
            out = params.codec.decode(params.inner, dtype, result(tensor, dtype, out))
            clear_dropped(out, blocks.spans(), params.layout.axis, 0)
            return out
        remaining = params.codec.decode(params.inner, dtype)
        out = result(tensor, dtype, out)
        clear(out)
        position = 0
        for first, last in blocks.spans():
            count = last - first
            if params.layout.axis:
                out[:, first:last] = remaining[:, position : position + count]
            else:
                out[first:last] = remaining[position : position + count]
            position += count
        return out

    def reader(self, tensor: Tensor) -> BlocksReader:
        return BlocksReader(tensor)

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking of the matrix of unpruned blocks into another layout of the inner codec."""
        params = _checked(tensor)
        same = isinstance(layout, BlocksLayout) and replace(layout, inner=params.layout.inner) == params.layout
        if not isinstance(layout, BlocksLayout) or not same:
            return cannot(layout, "the target keeps other blocks, or stores the matrix in another size")
        inner = params.codec.repack(params.inner, layout.inner)
        return repack_kept(tensor, layout, inner, lambda: _blocks(tensor, params).mask)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> BlocksEncoder:
        """Return the encoder. Options, all with defaults:

        ``axis`` 0 for rows, 1 for columns (0); ``block``, channels per block (64); ``mask``, bytes with a bit per
        block, lowest first, 1 for blocks to keep (all); ``inner``, a codec id (``dense``); ``options`` of that codec;
        ``whole``: store the matrix in full size, with zeros in dropped blocks (false).
        """
        return prepare(shape, dtype, options)


def stored_mask(tensor: Tensor) -> Blocks:
    """Return the blocks that a tensor of this codec keeps; only the mask is read and checked."""
    return _blocks(tensor, _checked(tensor))


def stored_matrix(tensor: Tensor) -> Tensor:
    """Return the remaining matrix as a tensor of the inner codec; the mask is checked."""
    params = _checked(tensor)
    _blocks(tensor, params)
    return params.inner


def with_blocks_dropped(tensor: Tensor, inner: Tensor, axis: int, blocks: Blocks) -> Tensor:
    """Return ``tensor`` without some blocks along ``axis``: a tensor of this codec around ``inner``, the remaining
    matrix.

    Raises the errors of ``BlocksCodec.check``.
    """
    within = OtherLayout(inner.codec, inner.params)
    layout = BlocksLayout(tensor.dtype, axis, blocks.block, blocks.channels, blocks.kept_channels, within)
    mask = memory_part(np.frombuffer(blocks.mask, np.uint8), "u8")
    parts = {MASK: mask, **inner.parts}
    pruned = replace(tensor, codec=ID, params=layout.attributes(), parts=parts, decoder=CODECS[ID])
    _blocks(pruned, _checked(pruned))
    return pruned


def clear_dropped(out: Array, spans: Sequence[tuple[int, int]], axis: int, start: int) -> None:
    """Set the rows (or columns, by ``axis``) outside ``spans`` to +0; ``out`` begins with row ``start``."""
    stop = out.shape[1] if axis else start + len(out)
    span_end = 0 if axis else start
    for first, last in (*(spans if axis else clip_spans(spans, start, stop)), (stop, stop)):
        clear(out[:, span_end:first] if axis else out[span_end - start : first - start])
        span_end = last


def clear(out: Array) -> None:
    """Set all elements of ``out`` to +0."""
    if out.size:
        out[...] = np.zeros((), out.dtype)


def read_columns(reader: RowReader, spans: Sequence[tuple[int, int]], cols: int, out: Array) -> None:
    """Fill ``out`` with rows: ``cols`` columns from ``reader`` at ``spans``, zeros elsewhere."""
    clear(out)
    step = max(1, _SCRATCH // max(cols, 1))
    for start in range(0, len(out), step):
        target = out[start : start + step]
        remaining = np.empty((len(target), cols), out.dtype)
        reader.read_into(remaining)
        position = 0
        for first, last in spans:
            target[:, first:last] = remaining[:, position : position + last - first]
            position += last - first


# A bit of a mask may stand for any number of zeros. A larger factor is implausible for pruning, and would let a few
# bytes declare a matrix that takes days to process.
_MAX_ELEMENTS_PER_BYTE = 1 << 16
_SCRATCH = 1 << 18  # elements in the buffer of a reader of columns


def _checked(tensor: Tensor) -> _Params:
    name = tensor.name
    if len(tensor.shape) != 2:
        raise CodecError(f"{ID}.shape", f"expected two dimensions, found {list(tensor.shape)}", where=name)
    stored = tensor.params.get("inner")
    codec = codec_of(stored) if isinstance(stored, str) else ""
    if codec == ID or codec not in CODECS or not CODECS[codec].streams:
        raise CodecError(
            f"{ID}.inner", f"expected a codec that can be read in chunks, found {stored!r:.80}", where=name
        )
    layout = BlocksLayout.from_tensor(tensor)
    if layout.channels != tensor.shape[layout.axis]:
        raise CodecError(
            f"{ID}.shape",
            f"expected {layout.channels} channels along axis {layout.axis}, found {list(tensor.shape)}",
            where=name,
        )
    if tensor.dtype not in DTYPES:
        raise CodecError(f"{ID}.params", f"expected a known dtype, found {tensor.dtype!r:.80}", where=name)
    _check_mask(tensor, require_part(tensor, MASK), mask_bytes(layout.channels, layout.block))
    if tensor.size > _MAX_ELEMENTS_PER_BYTE * tensor.nbytes:
        raise CodecError(
            f"{ID}.size",
            f"expected at most {_MAX_ELEMENTS_PER_BYTE} elements per stored byte, found {tensor.size} in "
            f"{tensor.nbytes} bytes",
            where=name,
        )
    parts = {role: part for role, part in tensor.parts.items() if role != MASK}
    params = dict(tensor.params["inner_params"])
    shape = layout.inner_shape(tensor.shape)
    inner = replace(tensor, shape=shape, codec=codec, params=params, parts=parts, decoder=CODECS[codec])
    CODECS[codec].check(inner)
    return _Params(layout, inner)


def _check_mask(tensor: Tensor, part: Part, nbytes: int) -> None:
    if part.dtype != "u8" or part.type not in (None, "u8") or part.nbytes != nbytes:
        raise CodecError(
            f"{ID}.size",
            f"expected {nbytes} bytes of u8 in part 'mask', found {part.nbytes} of {part.type or part.dtype}",
            where=tensor.name,
        )


def _blocks(tensor: Tensor, params: _Params) -> Blocks:
    """Check the mask, and return it.

    It must have no bits beyond the last block, and keep the declared number of channels.
    """
    blocks = Blocks(tensor.shape[params.layout.axis], params.layout.block, bytes(tensor.parts[MASK].view()))
    if blocks.has_spare_bits:
        raise CodecError(f"{ID}.mask", "bits beyond the last block are set; expected zeros", where=tensor.name)
    if blocks.kept_channels != params.layout.kept_channels:
        raise CodecError(
            f"{ID}.mask",
            f"expected {params.layout.kept_channels} kept channels, found a mask of {blocks.kept_channels}",
            where=tensor.name,
        )
    return blocks
