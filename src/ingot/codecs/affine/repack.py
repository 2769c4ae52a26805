"""Repacking of affine integers into another packing, with equal or smaller groups (``spec/affine.md``, "Repacking").

The codes of a chunk are first packed as rows that begin at bytes, first code lowest. If the target requires it, codes
then change between signed and unsigned, and rows are joined to one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from ingot.codecs.affine.parts import PackedReader, ScalesReader
from ingot.codecs.affine.rows import join_rows
from ingot.codecs.affine.windows import ComputedRows
from ingot.core.numeric.dtypes import as_bits, cast, float_name, from_file, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, FLAT_LSB, ROWS_LSB, SCALES, ZEROS, AffineLayout, Grid, Group
from ingot.model.part import CHUNK, Part
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True, slots=True)
class AffineRepack:
    """A repacking of a tensor's integers into ``target``, whose codes are bit streams with the first code lowest."""

    tensor: Tensor
    stored: AffineLayout
    target: AffineLayout

    @property
    def rows(self) -> int:
        """The number of rows of the repacked matrix.

        It is 0 if rows have neither columns nor scales, because such a tensor may declare any number of rows.
        """
        rows, cols = self.tensor.matrix_shape
        return rows if cols or self.stored.per_row else 0

    @property
    def step(self) -> int:
        """The row alignment of chunks: each chunk must begin at a multiple of this number of rows."""
        cols = self.tensor.matrix_shape[1]
        return 1 if self.target.in_rows(cols) else 8 // gcd(8, cols * self.target.bits)

    @property
    def memory(self) -> int:
        """The number of bytes of memory for each row of a chunk."""
        cols = self.tensor.matrix_shape[1]
        packed = max(self.stored.row_bytes(cols), self.target.row_bytes(cols)) + 1
        spread = 16 if self.stored.msb and 8 % self.stored.bits else 0  # two copies of the bits, one byte per bit
        scales = max(prod(layout.scale_shape(1, cols)) for layout in (self.stored, self.target))
        # Codes as read, aligned, flipped and joined; scales and zero points as read, and in two types.
        return (4 + spread) * packed + scales * 28

    @property
    def again(self) -> bool:
        """Whether all codes of the source are computed again for each chunk that is read."""
        source = self.tensor.parts[CODES].source
        return isinstance(source, ComputedRows) and source.again

    def why_not(self) -> str | None:
        """Return why a zero point cannot be shifted or omitted; None if all zero points can.

        If the answer depends on zero points, they are read and their digest checked.
        """
        delta = self._delta
        if self.stored.zeros and not self.target.zeros:
            return self._why_not_constant()
        if not delta or not self.stored.zeros or self.tensor.parts[ZEROS].integers is not None:
            return None  # each type of scales represents integers in the range of codes, shifted by half of that range
        fits = True
        for zeros in number_chunks(self.tensor.parts[ZEROS]):
            fits = fits and _shift_exactly(zeros, delta, self.target.scales) is not None
        return None if fits else f"{self.target.scales} cannot represent a zero point shifted by {delta:g} exactly"

    def _why_not_constant(self) -> str | None:
        bounds = self.tensor.parts[ZEROS].integers
        constant = self.target.zero_point or 0
        if bounds is not None and bounds[0] != bounds[1]:
            return f"zero points are integers from {bounds[0]} to {bounds[1]}, not all {constant:g}"
        same = [self.is_constant(zeros) for zeros in number_chunks(self.tensor.parts[ZEROS])]
        return None if all(same) else f"some zero points are not {self.target.zero_point or 0}"

    def is_constant(self, zeros: Array) -> bool:
        """Return whether all of the source's zero points equal the single zero point of the target layout."""
        # Not shifted: a tiny zero point would vanish in the sum.
        constant = (self.target.zero_point or 0) - self._delta
        return native.kernels.affine_equal(as_bits(zeros), float_name(zeros), constant)

    def reader(self) -> AffineRepackReader:
        """Return a reader that starts a pass over the tensor."""
        return AffineRepackReader(self)

    def reusing_reader(self) -> AffineRepackReader:
        """Return a reader whose codes are valid until the next chunk is read."""
        return AffineRepackReader(self, reused=True)

    @property
    def _delta(self) -> float:
        return shift(self.stored, self.target)

    def shift(self, zeros: Array) -> Array:
        """Return zero points plus the shift of the codes, in the type of the target's scales.

        Raises ``IntegrityError`` ``store.changed`` if that type cannot represent a sum. ``why_not`` excludes this case,
        so the source must have changed since.
        """
        if not self._delta:
            return cast(zeros, self.target.scales)
        shifted = _shift_exactly(zeros, self._delta, self.target.scales)
        if shifted is None:
            raise self.changed_error()
        return shifted

    def changed_error(self) -> IntegrityError:
        """Return the error for zero points that changed after ``why_not`` read them."""
        return IntegrityError(
            "store.changed",
            "the zero points differ from an earlier read: the source changed meanwhile; run again",
            where=self.tensor.name,
        )

    def new_zeros(self, count: int) -> Array:
        """Return ``count`` equal zero points, for a source with a single zero point instead of a part."""
        return np.full(count, (self.stored.zero_point or 0) + self._delta, numpy_dtype(self.target.scales))


class AffineRepackReader:
    """A sequential reader that returns a tensor's parts repacked, in chunks of rows."""

    def __init__(self, repack: AffineRepack, *, reused: bool = False) -> None:
        self._repack = repack
        parts = repack.tensor.parts
        stored = repack.stored
        target = repack.target
        self._cols = repack.tensor.matrix_shape[1]
        self._packed = PackedReader(parts[CODES], stored, self._cols)
        self._scales = ScalesReader(parts[SCALES], stored)
        self._zeros = ScalesReader(parts[ZEROS], stored) if stored.zeros else None
        self._mask = _row_mask(target.bits, self._cols, flip=False)
        self._flip: Array | np.uint8 | None = None
        if stored.signed != target.signed:
            row = _row_mask(target.bits, self._cols, flip=True)
            # a mask with equal bytes is faster as a scalar
            self._flip = row if 8 % target.bits or not row.size else _row_mask(target.bits, 8, flip=True)[0]
        self._reused = reused
        self._shared = False

    def read(self, rows: int) -> dict[str, Array]:
        scales = self._next(self._scales, rows)
        parts = {CODES: self._codes(rows), SCALES: cast(scales, self._repack.target.scales)}
        if self._zeros is not None:
            zeros = self._next(self._zeros, rows)
            if self._repack.target.zeros:
                parts[ZEROS] = self._repack.shift(zeros)
            elif not self._repack.is_constant(zeros):
                raise self._repack.changed_error()
        elif self._repack.target.zeros:
            parts[ZEROS] = self._repack.new_zeros(scales.size)
        self._shared = self._repack.stored.per_tensor
        return {role: values if role == CODES else self._repeat(values, rows) for role, values in parts.items()}

    def _repeat(self, values: Array, rows: int) -> Array:
        """Repeat the scales or zero points of groups for the target's smaller groups."""
        stored = self._repack.stored
        target = self._repack.target
        if stored.grid == target.grid or not values.size:
            return values
        factor = stored.group_columns(self._cols) // target.group_columns(self._cols)
        repeated = np.repeat(values.reshape(rows, -1), factor, axis=1)
        return np.ascontiguousarray(repeated[:, : target.scale_shape(rows, self._cols)[1]]).reshape(-1)

    def finish(self) -> None:
        self._packed.finish()
        self._scales.finish()
        if self._zeros is not None:
            self._zeros.finish()

    def _next(self, reader: ScalesReader, rows: int) -> Array:
        """Return the scales or zero points of the next ``rows`` rows.

        If the full tensor has a single number, the first chunk gets it, and the arrays of later chunks are empty.
        """
        return np.empty(0, np.float32) if self._shared else reader.next(rows, self._cols)

    def _codes(self, rows: int) -> Array:
        stored = self._repack.stored
        target = self._repack.target
        if not rows or not self._cols:
            return np.empty(0, np.uint8)
        packed, writable = self._packed.take(rows, reused=self._reused)
        matrix = packed.reshape(rows, -1)[:, : self._mask.size]  # words may be longer
        if stored.msb and stored.bits < 8:  # codes of full bytes are the same in both orders
            matrix = _mirror(matrix, stored.bits, self._cols)
            writable = True
        if self._flip is not None:
            matrix = np.bitwise_xor(matrix, self._flip, out=matrix if writable else None)
            writable = True
        if self._mask[-1] != 0xFF:
            matrix = matrix if writable else matrix.copy()
            matrix[:, -1] &= self._mask[-1]
        if target.in_rows(self._cols):
            return np.ascontiguousarray(matrix)
        return join_rows(matrix, self._cols * target.bits)


def difference(stored: AffineLayout, target: AffineLayout) -> str | None:
    """Return why no tensor with layout ``stored`` can be repacked into ``target``; None if the layouts allow it.

    The target must have the same bit width, and the same groups or equal fractions of them. Codes may change between
    signed and unsigned. The target packs codes in rows, or as one stream without padding. Scales keep their type or
    become f32. A single zero point becomes a part if the target has one; a part of equal zero points becomes the
    target's single zero point. Codes of tensors with offsets keep their signedness, because a shifted offset is not
    exact.
    """
    if stored.bits != target.bits or not _refines(stored.grid, target.grid):
        return "the target has other bits or another grid of scales, so its numbers differ"
    if stored.matrix is not None or stored.block is not None or target.matrix is not None:
        return "scales over blocks, and codes packed as another matrix than the tensor's, stay as they are"
    if target.packing not in (ROWS_LSB, FLAT_LSB):
        return f"this conversion packs codes as {ROWS_LSB} or {FLAT_LSB}, not as {target.packing}"
    if target.scales not in (stored.scales, "f32"):
        return f"scales of {stored.scales} become f32 or stay, not {target.scales}"
    return _why_not_zeros(stored, target) if stored.signed != target.signed or stored.zero != target.zero else None


def _refines(stored: Grid, target: Grid) -> bool:
    """Return whether each group of the target is within a group of the stored grid."""
    if isinstance(stored, Group) and isinstance(target, Group):
        return stored.columns % target.columns == 0
    return stored == target


def _why_not_zeros(stored: AffineLayout, target: AffineLayout) -> str | None:
    if stored.offset:
        return "offsets cannot become zero points, and keep the sign"
    moved = shift(stored, target) + (stored.zero_point or 0)
    constant = target.zero_point or 0
    if target.zeros or stored.zeros or moved == constant:
        return None
    return f"the single zero point of all codes is {moved:g}, not {constant}"


def shift(stored: AffineLayout, target: AffineLayout) -> float:
    """Return the difference between target codes and stored codes; zero points differ by the same number."""
    if stored.signed == target.signed:
        return 0.0
    return (-1.0 if target.signed else 1.0) * 2.0 ** (stored.bits - 1)


def number_chunks(part: Part) -> Iterator[Array]:
    """Yield a part's numbers in chunks; the digest is checked at the end."""
    reader = part.reader()
    for start in range(0, part.nbytes, CHUNK):
        raw = np.empty(min(CHUNK, part.nbytes - start), np.uint8)
        reader.readinto(raw.data)
        yield from_file(raw, part.dtype)
    reader.finish()


def _shift_exactly(zeros: Array, delta: float, dtype: str) -> Array | None:
    """Return ``zeros + delta`` in ``dtype``; None if ``dtype`` cannot represent a sum exactly.

    The magnitude of ``delta`` is a power of two from 1 to 128.
    """
    out = np.empty(zeros.shape, numpy_dtype(dtype))
    fits = native.kernels.affine_shift(as_bits(zeros), float_name(zeros), delta, written(out), dtype)
    return out if fits else None


def _row_mask(bits: int, cols: int, *, flip: bool) -> Array:
    """Return the mask of a row of codes: with ``flip`` all bits, else the highest bit of each code."""
    code = np.zeros(bits, np.uint8)
    code[-1 if flip else 0 :] = 1
    pattern = np.packbits(np.tile(code, 8), bitorder="little")
    mask = np.resize(pattern, -(-cols * bits // 8))
    if mask.size:
        mask[-1] &= 0xFF >> (-cols * bits % 8)
    return mask


def _mirror(matrix: Array, bits: int, cols: int) -> Array:
    """Convert rows whose first code is in the high bits of a byte to rows whose first code is in the low bits."""
    if 8 % bits == 0:
        for width, low in ((4, 0x0F), (2, 0x33), (1, 0x55)):  # swap halves of a byte, then halves of the halves
            if width >= bits:
                matrix = (matrix & low) << width | matrix >> width & low
        return matrix
    spread = np.unpackbits(matrix, axis=1, count=cols * bits, bitorder="big")
    mirrored = spread.reshape(len(matrix), cols, bits)[:, :, ::-1].reshape(spread.shape)
    return np.packbits(mirrored, axis=1, bitorder="little")
