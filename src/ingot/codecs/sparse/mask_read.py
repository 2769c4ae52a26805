"""Reading of ``sparse_mask``: kept values go where the mask has a bit, in pieces that stay in cache."""

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
from ingot.model.reading.slices import pass_over
from ingot.model.tensor import Array, Tensor

# Elements at a time.
PIECE = 1 << 17


class AlignedBits:
    """Sequential reading of a mask whose rows are filled up with zeros: the bits of the columns, as ``BitReader``.

    Other bits behind a row's columns are refused: ``sparse_mask.padding``.
    """

    def __init__(self, part: Part, cols: int, padding: int, where: str) -> None:
        self._bits = BitReader(part, 1, f"{ID}.padding", where)
        self._cols, self._padding, self._where = cols, padding, where
        self._column = 0  # of the next bit

    def next(self, count: int) -> Array:
        """Return the next ``count`` bits as a stream that begins at a byte, the bits behind them 0."""
        out, done = np.empty(count, np.uint8), 0
        while done < count:
            rows = 0 if self._column else (count - done) // self._cols
            taken = rows * self._cols if rows else min(count - done, self._cols - self._column)
            out[done : done + taken] = self._rows(rows) if rows else self._begun(taken)
            done += taken
        return np.packbits(out, bitorder="little")

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` bits, and what fills up the rows that end with them, without a look at it."""
        rows, self._column = divmod(self._column + count, self._cols)
        self._bits.skip(count + rows * self._padding)

    def finish(self) -> None:
        """Check the digest, once all were read."""
        self._bits.finish()

    def _rows(self, count: int) -> Array:
        """Return the bits of ``count`` whole rows, one a byte."""
        width = self._cols + self._padding
        bits = np.unpackbits(self._bits.next(count * width), count=count * width, bitorder="little")
        rows = bits.reshape(count, width)
        self._require_zeros(rows[:, self._cols :])
        kept: Array = rows[:, : self._cols].reshape(-1)
        return kept

    def _begun(self, count: int) -> Array:
        """Return the next ``count`` bits of a row, one a byte; pass over what fills up the row where they end it."""
        bits: Array = np.unpackbits(self._bits.next(count), count=count, bitorder="little")
        self._column += count
        if self._column == self._cols:
            self._require_zeros(self._bits.next(self._padding))
            self._column = 0
        return bits

    def _require_zeros(self, padding: Array) -> None:
        if padding.any():
            raise CodecError(f"{ID}.padding", "expected zeros behind the columns of every row", where=self._where)


class Mask:
    """Sequential reading of the mask with a count of its bits against what the tensor says.

    What is left behind the last bit is refused (``sparse_mask.padding``), and a mask of more or fewer bits
    (``sparse_mask.popcount``).
    """

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        part, cols = tensor.parts[MASK], tensor.matrix_shape[1]
        self._bits: BitReader | AlignedBits = (
            AlignedBits(part, cols, params.padding, tensor.name)
            if params.padding
            else BitReader(part, 1, f"{ID}.padding", tensor.name)
        )
        self._left: int | None = params.nnz  # None once bits were passed over
        self._nnz, self._where = params.nnz, tensor.name

    def next(self, count: int) -> tuple[Array, int]:
        """Return the next ``count`` bits, and how many of them are set."""
        piece = self._bits.next(count)
        kept = native.kernels.mask_count(piece, count)
        if self._left is not None:
            if kept > self._left:
                raise self._refuse("more")
            self._left -= kept
        return piece, kept

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` bits without a look at them: how many are set is then not compared."""
        self._bits.skip(count)
        self._left = None

    def finish(self) -> None:
        self._bits.finish()
        if self._left:
            raise self._refuse("fewer")

    def kept(self, count: int) -> int:
        """Pass over the next ``count`` bits and return how many of them are set."""
        return sum(self.next(min(PIECE, count - start))[1] for start in range(0, count, PIECE))

    def _refuse(self, how: str) -> CodecError:
        return CodecError(f"{ID}.popcount", f"expected a mask of {self._nnz} bits, found {how}", where=self._where)


def kept_elements(tensor: Tensor) -> Array:
    """Return which elements a tensor keeps, bool in its shape; errors as of a reader."""
    mask = Mask(tensor, params_of(tensor))
    packed, _ = mask.next(tensor.size)
    mask.finish()
    return np.unpackbits(packed, count=tensor.size, bitorder="little").astype(np.bool_).reshape(tensor.shape)


class DenseMaskReader(Rows):
    """Sequential decoding where the kept values themselves are stored."""

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        self._name, self._row = tensor.name, decodable(tensor)
        self._mask = Mask(tensor, params)
        self._values = tensor.parts[NONZEROS].reader()

    def fill(self, out: Array) -> None:
        own = numpy_dtype(self._row.name)
        if out.dtype != own:
            require_cast(self._row.name, dtype(out.dtype).name, self._name)
        flat = out.reshape(-1)
        for start in range(0, flat.size, PIECE):
            target = flat[start : start + PIECE]
            mask, kept = self._mask.next(target.size)
            values = np.empty(kept, own)
            read_values(self._values, values, self._row, self._name)
            if out.dtype != own:
                cast = np.empty(kept, out.dtype)
                cast_into(values, cast, self._name)
                values = cast
            native.kernels.mask_expand(mask, as_words(values), as_words(target))

    def skip(self, count: int) -> None:
        """Pass over ``count`` values: their bits tell how many are stored."""
        self._values.skip(self._row.nbytes(self._mask.kept(count)))

    def finish(self) -> None:
        self._mask.finish()
        self._values.finish()


class CodeMaskReader(Rows):
    """Sequential decoding where codes are stored: the inner codec's reader sees a dense tensor of them."""

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        assert params.layout is not None
        self._mask = Mask(tensor, params)
        self._codes = Scattered(tensor, params)
        self._cols, self._dtype = tensor.matrix_shape[1], numpy_dtype(tensor.dtype)
        self._inner = params.codec.reader(with_codes(params, Part("u8", params.layout.nbytes, self._codes)))

    def fill(self, out: Array) -> None:
        if not out.size:
            return
        step = max(1, PIECE // max(out.shape[-1], 1))
        for start in range(0, len(out), step):
            target = out[start : start + step]
            self._inner.read_into(target)
            mask, _ = self._mask.next(target.size)
            native.kernels.mask_clear(mask, as_words(target.reshape(-1)))

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        self._mask.skip(count)
        pass_over(self._inner, count, self._cols, self._dtype)

    def finish(self) -> None:
        self._inner.finish()
        self._codes.finish()
        self._mask.finish()


class Scattered:
    """The codes of a dense tensor as a byte source, made as they are read: 0 where the mask has no bit.

    It is read once, from beginning to end; what is passed over is not made.
    """

    mapped = False

    def __init__(self, tensor: Tensor, params: MaskParams) -> None:
        assert params.layout is not None
        self.name, self.size = tensor.name, params.layout.nbytes
        self._layout: CodeLayout = params.layout
        self._mask = Mask(tensor, params)
        self._kept = BitReader(tensor.parts[NONZEROS], self._layout.bits, f"{ID}.padding", tensor.name)
        self._elements, self._position = tensor.size, 0
        self._ready: Array = np.empty(0, np.uint8)

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(length, np.uint8)
        self.readinto(offset, out.data)
        return out.data

    def readinto(self, offset: int, out: memoryview) -> None:
        if offset < self._position:
            raise ValueError(f"expected reading on from {self._position}, found {offset}")
        self._pass_over(offset - self._position)
        self._position = offset
        done = 0
        while done < out.nbytes:
            if not self._ready.size:
                self._ready = self._next()
            count = min(self._ready.size, out.nbytes - done)
            out[done : done + count] = self._ready[:count].data
            self._ready = self._ready[count:]
            done += count
        self._position += done

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def finish(self) -> None:
        """Check the mask and the stored codes, whose every byte was read unless a tensor has none."""
        self._mask.finish()
        self._kept.finish()

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
            self._kept.skip(self._mask.kept(count))
            nbytes -= size

    def _step(self) -> int:
        """Return the elements that are made at a time."""
        cols = self._layout.cols
        return min(max(1, PIECE // cols) * cols if cols else PIECE, self._elements)

    def _next(self) -> Array:
        cols, bits = self._layout.cols, self._layout.bits
        count = self._step()
        self._elements -= count
        if not count:
            raise ValueError("expected no more codes to be asked for than there are")
        mask, kept = self._mask.next(count)
        codes = np.empty(count, np.uint8)
        native.kernels.mask_expand(mask, unpack(self._kept.next(kept), bits, kept), codes)
        packed = pack(codes, bits)
        if cols and cols * bits % 8:
            return align_rows(packed, 0, (count // cols, cols * bits))
        return packed


def as_words(values: Array) -> Array:
    """View values as unsigned integers of their size."""
    return values.view(f"u{values.dtype.itemsize}")


def reader_of(tensor: Tensor) -> DenseMaskReader | CodeMaskReader:
    """Check a tensor and return its reader."""
    params = params_of(tensor)
    return DenseMaskReader(tensor, params) if params.inner is None else CodeMaskReader(tensor, params)
