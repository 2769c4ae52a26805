"""Reading of ``sparse_mask``: the mask expands selected values, in batches that stay in cache."""

from __future__ import annotations

import numpy as np

from ingot.codecs.affine.rows import align_rows
from ingot.codecs.base import Rows
from ingot.codecs.cast import cast_into, require_cast
from ingot.codecs.dense.codec import decodable, read_values
from ingot.codecs.palette.rows import BitReader, pack, unpack
from ingot.codecs.sparse.mask_params import ID, CodeLayout, MaskParams, params_of, with_codes
from ingot.core.numeric.dtypes import dtype, numpy_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.sparse import MASK, NONZEROS
from ingot.model.part import Part
from ingot.model.reading.slices import skip_elements
from ingot.model.tensor import Array, Tensor

BATCH = 1 << 17  # elements at a time


class AlignedBits:
    """A sequential reader of a mask with padded rows that returns the bits of the columns; see ``BitReader``.

    Padding bits that are not 0 are refused with ``sparse_mask.padding``.
    """

    def __init__(self, part: Part, cols: int, padding: int, location: str) -> None:
        self._bits = BitReader(part, 1, f"{ID}.padding", location)
        self._cols = cols
        self._padding = padding
        self._location = location
        self._column = 0  # the column of the next bit

    def next(self, count: int) -> Array:
        """Return the next ``count`` bits as a stream that begins at a byte, padded with zeros."""
        out = np.empty(count, np.uint8)
        filled = 0
        while filled < count:
            rows = 0 if self._column else (count - filled) // self._cols
            bits = rows * self._cols if rows else min(count - filled, self._cols - self._column)
            out[filled : filled + bits] = self._rows(rows) if rows else self._start_row(bits)
            filled += bits
        return np.packbits(out, bitorder="little")

    def skip(self, count: int) -> None:
        """Skip the next ``count`` bits, and, without a check, the padding of the rows that end within them."""
        rows, self._column = divmod(self._column + count, self._cols)
        self._bits.skip(count + rows * self._padding)

    def finish(self) -> None:
        """Check the digest; called after all bits were read or skipped."""
        self._bits.finish()

    def _rows(self, count: int) -> Array:
        """Return the bits of the next ``count`` full rows without padding, one byte per bit."""
        width = self._cols + self._padding
        bits = np.unpackbits(self._bits.next(count * width), count=count * width, bitorder="little")
        rows = bits.reshape(count, width)
        self._require_zeros(rows[:, self._cols :])
        columns: Array = rows[:, : self._cols].reshape(-1)
        return columns

    def _start_row(self, count: int) -> Array:
        """Return the next ``count`` bits of a row, one byte per bit; if the row ends, skip its padding too."""
        bits: Array = np.unpackbits(self._bits.next(count), count=count, bitorder="little")
        self._column += count
        if self._column == self._cols:
            self._require_zeros(self._bits.next(self._padding))
            self._column = 0
        return bits

    def _require_zeros(self, padding: Array) -> None:
        if padding.any():
            raise CodecError(f"{ID}.padding", "expected zeros after the columns of every row", where=self._location)


class Mask:
    """A sequential reader of the mask that compares the number of set bits with the declared number.

    Raises ``sparse_mask.padding`` if bits after the last element are set, ``sparse_mask.popcount`` if the numbers
    differ.
    """

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        part = tensor.parts[MASK]
        cols = tensor.matrix_shape[1]
        self._bits: BitReader | AlignedBits = (
            AlignedBits(part, cols, params.padding, tensor.name)
            if params.padding
            else BitReader(part, 1, f"{ID}.padding", tensor.name)
        )
        self._remaining: int | None = params.nnz  # None after bits were skipped
        self._nnz = params.nnz
        self._tensor_name = tensor.name

    def next(self, count: int) -> tuple[Array, int]:
        """Return the next ``count`` bits, and the number of set bits."""
        bits = self._bits.next(count)
        selected = native.kernels.mask_count(bits, count)
        if self._remaining is not None:
            if selected > self._remaining:
                raise self._refuse("more")
            self._remaining -= selected
        return bits, selected

    def skip(self, count: int) -> None:
        """Skip the next ``count`` bits; afterwards the number of set bits is not checked."""
        self._bits.skip(count)
        self._remaining = None

    def finish(self) -> None:
        self._bits.finish()
        if self._remaining:
            raise self._refuse("fewer")

    def count_bits(self, count: int) -> int:
        """Read the next ``count`` bits and return the number of set bits."""
        return sum(self.next(min(BATCH, count - start))[1] for start in range(0, count, BATCH))

    def _refuse(self, how: str) -> CodecError:
        return CodecError(
            f"{ID}.popcount", f"expected a mask of {self._nnz} bits, found {how}", where=self._tensor_name
        )


def read_mask(tensor: Tensor) -> Array:
    """Return a bool array of the tensor's shape that marks stored elements; raises the errors of a reader."""
    mask = Mask(tensor, params_of(tensor))
    packed, _ = mask.next(tensor.size)
    mask.finish()
    return np.unpackbits(packed, count=tensor.size, bitorder="little").astype(np.bool_).reshape(tensor.shape)


class DenseMaskReader(Rows):
    """A sequential reader of a tensor that stores the selected values."""

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        self._name = tensor.name
        self._row = decodable(tensor)
        self._mask = Mask(tensor, params)
        self._values = tensor.parts[NONZEROS].reader()

    def fill(self, out: Array) -> None:
        stored_dtype = numpy_dtype(self._row.name)
        if out.dtype != stored_dtype:
            require_cast(self._row.name, dtype(out.dtype).name, self._name)
        flat = out.reshape(-1)
        for start in range(0, flat.size, BATCH):
            target = flat[start : start + BATCH]
            mask, selected = self._mask.next(target.size)
            values = np.empty(selected, stored_dtype)
            read_values(self._values, values, self._row, self._name)
            if out.dtype != stored_dtype:
                cast = np.empty(selected, out.dtype)
                cast_into(values, cast, self._name)
                values = cast
            native.kernels.mask_expand(mask, as_words(values), as_words(target))

    def skip(self, count: int) -> None:
        """Skip ``count`` values, with the stored values among them."""
        self._values.skip(self._row.nbytes(self._mask.count_bits(count)))

    def finish(self) -> None:
        self._mask.finish()
        self._values.finish()


class CodeMaskReader(Rows):
    """A sequential reader of a tensor that stores codes; the inner codec decodes them as a dense tensor."""

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        assert params.layout is not None
        self._mask = Mask(tensor, params)
        self._codes = ScatteredCodes(tensor, params)
        self._cols = tensor.matrix_shape[1]
        self._dtype = numpy_dtype(tensor.dtype)
        self._inner = params.codec.reader(with_codes(params, Part("u8", params.layout.nbytes, self._codes)))

    def fill(self, out: Array) -> None:
        if not out.size:
            return
        step = max(1, BATCH // max(out.shape[-1], 1))
        for start in range(0, len(out), step):
            target = out[start : start + step]
            self._inner.read_into(target)
            mask, _ = self._mask.next(target.size)
            native.kernels.mask_clear(mask, as_words(target.reshape(-1)))

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        self._mask.skip(count)
        skip_elements(self._inner, count, self._cols, self._dtype)

    def finish(self) -> None:
        self._inner.finish()
        self._codes.finish()
        self._mask.finish()


class ScatteredCodes:
    """A byte source with the codes of a dense tensor, computed on access.

    An element whose mask bit is 0 has the code 0. The source must be read once, from beginning to end; skipped codes
    are not computed.
    """

    mapped = False

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        assert params.layout is not None
        self.name = tensor.name
        self.size = params.layout.nbytes
        self._layout: CodeLayout = params.layout
        self._mask = Mask(tensor, params)
        self._selected = BitReader(tensor.parts[NONZEROS], self._layout.bits, f"{ID}.padding", tensor.name)
        self._elements = tensor.size
        self._position = 0
        self._ready: Array = np.empty(0, np.uint8)

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(length, np.uint8)
        self.readinto(offset, out.data)
        return out.data

    def readinto(self, offset: int, out: memoryview) -> None:
        if offset < self._position:
            raise ValueError(f"expected a sequential read from {self._position}, found {offset}")
        self._pass_over(offset - self._position)
        self._position = offset
        filled = 0
        while filled < out.nbytes:
            if not self._ready.size:
                self._ready = self._next()
            count = min(self._ready.size, out.nbytes - filled)
            out[filled : filled + count] = self._ready[:count].data
            self._ready = self._ready[count:]
            filled += count
        self._position += filled

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def finish(self) -> None:
        """Check the mask and the stored codes."""
        self._mask.finish()
        self._selected.finish()

    def _pass_over(self, nbytes: int) -> None:
        ready = min(nbytes, self._ready.size)
        self._ready, nbytes = self._ready[ready:], nbytes - ready
        while nbytes:
            count = self._step()
            size = self._layout.bytes_of(count)
            if not count or size > nbytes:
                self._ready = self._next()[nbytes:]
                return
            self._elements -= count
            self._selected.skip(self._mask.count_bits(count))
            nbytes -= size

    def _step(self) -> int:
        """Return the number of elements to compute at a time."""
        cols = self._layout.cols
        return min(max(1, BATCH // cols) * cols if cols else BATCH, self._elements)

    def _next(self) -> Array:
        cols = self._layout.cols
        bits = self._layout.bits
        count = self._step()
        self._elements -= count
        if not count:
            raise ValueError("more codes were requested than the tensor has")
        mask, selected = self._mask.next(count)
        codes = np.empty(count, np.uint8)
        native.kernels.mask_expand(mask, unpack(self._selected.next(selected), bits, selected), codes)
        packed = pack(codes, bits)
        if cols and cols * bits % 8:
            return align_rows(packed, 0, (count // cols, cols * bits))
        return packed


def as_words(values: Array) -> Array:
    """Return values as unsigned integers of their size, without a copy."""
    return values.view(f"u{values.dtype.itemsize}")


def reader_of(tensor: Tensor) -> DenseMaskReader | CodeMaskReader:
    """Check a tensor, and return its reader."""
    params = params_of(tensor)
    return DenseMaskReader(tensor, params) if params.inner is None else CodeMaskReader(tensor, params)
