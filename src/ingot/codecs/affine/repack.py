"""The affine family's integers in another layout: other packing, same or finer grid (``spec/affine.md``, "Repacking").

Whatever the layout, a chunk is first brought to rows that begin at a byte, lowest bit first; from there signs flip and
rows join.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from ingot.codecs.affine.parts import PackedReader, ScalesReader
from ingot.codecs.affine.rows import join_rows
from ingot.codecs.affine.windows import MadeSource
from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.core.numeric.floats import as_bits, cast, float_name, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, FLAT_LSB, ROWS_LSB, SCALES, ZEROS, AffineLayout, Grid, Group
from ingot.model.part import CHUNK, Part
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True, slots=True)
class AffineRepack:
    """A tensor's integers as ``target`` packs them: bit streams, low bits first; zero points are no offsets."""

    tensor: Tensor
    stored: AffineLayout
    target: AffineLayout

    @property
    def rows(self) -> int:
        """Rows to go through: none where empty rows have no scales either, for there may be any number of them."""
        rows, cols = self.tensor.matrix_shape
        return rows if cols or self.stored.per_row else 0

    @property
    def step(self) -> int:
        """Rows at whose multiples chunks may begin."""
        cols = self.tensor.matrix_shape[1]
        return 1 if self.target.in_rows(cols) else 8 // gcd(8, cols * self.target.bits)

    @property
    def memory(self) -> int:
        """Bytes per row that a chunk takes."""
        cols = self.tensor.matrix_shape[1]
        packed = max(self.stored.row_bytes(cols), self.target.row_bytes(cols)) + 1
        spread = 16 if self.stored.msb and 8 % self.stored.bits else 0  # a byte per bit, twice
        scales = max(prod(layout.scale_shape(1, cols)) for layout in (self.stored, self.target))
        # Codes as read or made, aligned, flipped and joined; scales and zero points as read, and in two types.
        return (4 + spread) * packed + scales * 28

    @property
    def again(self) -> bool:
        """Whether each chunk goes through all codes of the source."""
        source = self.tensor.parts[CODES].source
        return isinstance(source, MadeSource) and source.again

    def why_not(self) -> str | None:
        """Why a zero point cannot be shifted or left out; reads them, and checks their digest, where they must be."""
        delta = self._delta
        if self.stored.zeros and not self.target.zeros:
            return self._why_not_one()
        if not delta or not self.stored.zeros or self.tensor.parts[ZEROS].integers is not None:
            return None  # integers that codes could be, shifted by half of these, are numbers of any type of scales
        fits = True
        for zeros in pieces(self.tensor.parts[ZEROS]):
            fits = fits and _shifted(zeros, delta, self.target.scales) is not None
        return None if fits else f"a zero point shifted by {delta:g} is no number of {self.target.scales}"

    def _why_not_one(self) -> str | None:
        known, one = self.tensor.parts[ZEROS].integers, self.target.zero_point or 0
        if known is not None and known[0] != known[1]:
            return f"zero points are integers from {known[0]} to {known[1]}, not {one:g}, the one for all codes"
        same = [self.is_one(zeros) for zeros in pieces(self.tensor.parts[ZEROS])]
        return None if all(same) else f"zero points differ from {self.target.zero_point or 0}, the one for all codes"

    def is_one(self, zeros: Array) -> bool:
        """Whether zero points of the source are all the one that the target has for every code."""
        # Not shifted: a tiny zero point would be lost in the sum.
        wanted = (self.target.zero_point or 0) - self._delta
        return native.kernels.affine_equal(as_bits(zeros), float_name(zeros), wanted)

    def reader(self) -> AffineRepackReader:
        """Begin a pass over the tensor."""
        return AffineRepackReader(self)

    def passing(self) -> AffineRepackReader:
        """Begin a pass of which nobody keeps codes beyond the next chunk."""
        return AffineRepackReader(self, reused=True)

    @property
    def _delta(self) -> float:
        return shift(self.stored, self.target)

    def shift(self, zeros: Array) -> Array:
        """Return zero points as the target has them."""
        if not self._delta:
            return cast(zeros, self.target.scales)
        shifted = _shifted(zeros, self._delta, self.target.scales)
        if shifted is None:
            raise self.changed()
        return shifted

    def changed(self) -> IntegrityError:
        """Return the error for zero points that ``why_not`` did not see."""
        return IntegrityError(
            "store.changed",
            "expected the zero points that were read before, found others: the source changed",
            where=self.tensor.name,
        )

    def new_zeros(self, count: int) -> Array:
        """Return the zero points of a tensor that has none, or one for all codes."""
        return np.full(count, (self.stored.zero_point or 0) + self._delta, numpy_dtype(self.target.scales))


class AffineRepackReader:
    """One pass over a tensor's parts."""

    def __init__(self, repack: AffineRepack, *, reused: bool = False) -> None:
        self._repack = repack
        parts, stored, target = repack.tensor.parts, repack.stored, repack.target
        self._cols = repack.tensor.matrix_shape[1]
        self._packed = PackedReader(parts[CODES], stored, self._cols)
        self._scales = ScalesReader(parts[SCALES], stored)
        self._zeros = ScalesReader(parts[ZEROS], stored) if stored.zeros else None
        self._mask = _row_mask(target.bits, self._cols, flip=False)
        self._flip: Array | np.uint8 | None = None
        if stored.signed != target.signed:
            row = _row_mask(target.bits, self._cols, flip=True)
            # What is the same for every byte takes no look at the row.
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
            elif not self._repack.is_one(zeros):
                raise self._repack.changed()
        elif self._repack.target.zeros:
            parts[ZEROS] = self._repack.new_zeros(scales.size)
        self._shared = self._repack.stored.per_tensor
        return {role: values if role == CODES else self._refined(values, rows) for role, values in parts.items()}

    def _refined(self, values: Array, rows: int) -> Array:
        """Repeat the scales or zero points of groups for the smaller groups of the target."""
        stored, target = self._repack.stored, self._repack.target
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
        """Return the next scales or zero points; what the tensor has once goes with the first rows."""
        return np.empty(0, np.float32) if self._shared else reader.next(rows, self._cols)

    def _codes(self, rows: int) -> Array:
        stored, target = self._repack.stored, self._repack.target
        if not rows or not self._cols:
            return np.empty(0, np.uint8)
        packed, own = self._packed.take(rows, reused=self._reused)
        matrix = packed.reshape(rows, -1)[:, : self._mask.size]  # words may be longer
        if stored.msb and stored.bits < 8:  # codes of whole bytes lie the same either way
            matrix, own = _mirrored(matrix, stored.bits, self._cols), True
        if self._flip is not None:
            matrix, own = np.bitwise_xor(matrix, self._flip, out=matrix if own else None), True
        if self._mask[-1] != 0xFF:
            matrix = matrix if own else matrix.copy()
            matrix[:, -1] &= self._mask[-1]
        if target.in_rows(self._cols):
            return np.ascontiguousarray(matrix)
        return join_rows(matrix, self._cols * target.bits)


def difference(stored: AffineLayout, target: AffineLayout) -> str | None:
    """Why no layout ``target`` has the integers and scales of ``stored``, whatever they are; None if it may.

    Both are of one tensor. Groups stay, or are cut into equal smaller ones. Codes keep their sign or change it, in rows
    or, where these do not fill their bytes, without padding; scales keep their type or become f32. One zero point for
    all codes becomes a part where the target has one, and a part of equal ones may be left out where the target has
    that one. Offsets keep the sign: a shifted one is not exact.
    """
    if stored.bits != target.bits or not _refines(stored.grid, target.grid):
        return "codes of other bits, or scales on another grid, are other numbers"
    if stored.matrix is not None or stored.block is not None or target.matrix is not None:
        return "scales over blocks, and codes packed as another matrix than the tensor's, stay as they are"
    if target.packing not in (ROWS_LSB, FLAT_LSB):
        return f"codes are packed as {ROWS_LSB} or {FLAT_LSB}, not as {target.packing}"
    if target.scales not in (stored.scales, "f32"):
        return f"scales of {stored.scales} become f32 or stay, not {target.scales}"
    return _other_zeros(stored, target) if stored.signed != target.signed or stored.zero != target.zero else None


def _refines(stored: Grid, target: Grid) -> bool:
    """Whether each group of the target lies in one group of the stored grid."""
    if isinstance(stored, Group) and isinstance(target, Group):
        return stored.columns % target.columns == 0
    return stored == target


def _other_zeros(stored: AffineLayout, target: AffineLayout) -> str | None:
    if stored.offset:
        return "offsets cannot become zero points, and keep the sign"
    moved, wanted = shift(stored, target) + (stored.zero_point or 0), target.zero_point or 0
    if target.zeros or stored.zeros or moved == wanted:
        return None
    return f"the one zero point of all codes is {moved:g}, not {wanted}"


def shift(stored: AffineLayout, target: AffineLayout) -> float:
    """Return what is added to every code, and so to every zero point."""
    if stored.signed == target.signed:
        return 0.0
    return (-1.0 if target.signed else 1.0) * 2.0 ** (stored.bits - 1)


def pieces(part: Part) -> Iterator[Array]:
    """Yield a part's numbers; its digest is checked at the end."""
    reader = part.reader()
    for start in range(0, part.nbytes, CHUNK):
        raw = np.empty(min(CHUNK, part.nbytes - start), np.uint8)
        reader.readinto(raw.data)
        yield from_file(raw, part.dtype)
    reader.finish()


def _shifted(zeros: Array, delta: float, dtype: str) -> Array | None:
    """Return ``zeros + delta`` in ``dtype``; None unless each is exact. ``delta`` is a power of two from 1 to 128."""
    out = np.empty(zeros.shape, numpy_dtype(dtype))
    fits = native.kernels.affine_shift(as_bits(zeros), float_name(zeros), delta, written(out), dtype)
    return out if fits else None


def _row_mask(bits: int, cols: int, *, flip: bool) -> Array:
    """Return a row's bytes, lowest bit first, with the highest bit of each code set, or with every bit of each code."""
    code = np.zeros(bits, np.uint8)
    code[-1 if flip else 0 :] = 1
    pattern = np.packbits(np.tile(code, 8), bitorder="little")
    mask = np.resize(pattern, -(-cols * bits // 8))
    if mask.size:
        mask[-1] &= 0xFF >> (-cols * bits % 8)
    return mask


def _mirrored(matrix: Array, bits: int, cols: int) -> Array:
    """Return rows whose first code lies in the high bits as rows whose first code lies in the low ones."""
    if 8 % bits == 0:
        for width, low in ((4, 0x0F), (2, 0x33), (1, 0x55)):  # halves change places, and halves of halves
            if width >= bits:
                matrix = (matrix & low) << width | matrix >> width & low
        return matrix
    spread = np.unpackbits(matrix, axis=1, count=cols * bits, bitorder="big")
    turned = spread.reshape(len(matrix), cols, bits)[:, :, ::-1].reshape(spread.shape)
    return np.packbits(turned, axis=1, bitorder="little")
