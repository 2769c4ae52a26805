"""The affine family's integers in another layout: same grid, other packing (``spec/affine.md``, "Repacking").

Whatever the layout, a chunk is first brought to rows that begin at a byte, lowest bit first; from there signs flip and
rows join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import numpy as np

from ingot.codecs.affine.encode import part_specs
from ingot.codecs.affine.params import AffineParams
from ingot.codecs.affine.parts import PackedReader, ScalesReader
from ingot.codecs.affine.rows import join_rows
from ingot.core.dtypes import from_file, numpy_dtype
from ingot.core.floats import FLOATS, cast
from ingot.errors import IntegrityError
from ingot.model.part import CHUNK
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

# Past it float64, in which shifts are checked, no longer holds every integer with every fraction that f32 has.
_MOST_ZERO = 2.0**40


@dataclass(frozen=True, slots=True)
class AffineRepack:
    """A tensor's integers as ``target`` packs them, scales and zero points in ``scale_dtype``."""

    tensor: Tensor
    stored: AffineParams
    target: AffineParams
    scale_dtype: str
    codec: str = "quantized_group"

    @property
    def params(self) -> Mapping[str, Any]:
        return self.target.attributes()

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        return part_specs(self.target, self.scale_dtype, *self.tensor.matrix_shape)

    @property
    def rows(self) -> int:
        """Rows to go through: none where empty rows have no scales either, for there may be any number of them."""
        rows, cols = self.tensor.matrix_shape
        return rows if cols or self.stored.granularity == "row" else 0

    @property
    def step(self) -> int:
        cols = self.tensor.matrix_shape[1]
        return 1 if self.target.in_rows(cols) else 8 // gcd(8, cols * self.target.bits)

    @property
    def memory(self) -> int:
        cols = self.tensor.matrix_shape[1]
        packed = max(self.stored.row_bytes(cols), self.target.row_bytes(cols)) + 1
        spread = 16 if self.stored.msb and 8 % self.stored.bits else 0  # a byte per bit, twice
        scales = prod(self.stored.scale_shape(1, cols))
        # Codes as read, aligned, flipped, joined, and intermediate results; zero points are checked in float64.
        return (6 + spread) * packed + scales * 40

    def exact(self) -> bool:
        """Whether every zero point can be shifted; reads them all, and checks their digest, where they must be."""
        delta = self._delta
        if not delta or not self.stored.zeros:
            return True
        part = self.tensor.parts["zeros"]
        reader, fits = part.reader(), True
        for start in range(0, part.nbytes, CHUNK):
            raw = np.empty(min(CHUNK, part.nbytes - start), np.uint8)
            reader.readinto(raw.data)
            fits = fits and _shifted(from_file(raw, part.dtype), delta, self.scale_dtype) is not None
        reader.finish()
        return fits

    def reader(self) -> AffineRepackReader:
        return AffineRepackReader(self)

    @property
    def _delta(self) -> float:
        """What is added to every code, and so to every zero point."""
        if self.stored.signed == self.target.signed:
            return 0.0
        return (-1.0 if self.target.signed else 1.0) * 2.0 ** (self.stored.bits - 1)

    def shift(self, zeros: Array) -> Array:
        """Return zero points as the target has them."""
        if not self._delta:
            return cast(zeros, self.scale_dtype)
        found = _shifted(zeros, self._delta, self.scale_dtype)
        if found is None:  # ``exact`` saw others
            raise IntegrityError(
                "store.changed",
                "expected the zero points that were read before, found others: the source changed",
                where=self.tensor.name,
            )
        return found

    def new_zeros(self, count: int) -> Array:
        """Return the zero points of a tensor that has none, or one for all codes."""
        return np.full(count, (self.stored.zero_point or 0) + self._delta, numpy_dtype(self.scale_dtype))


class AffineRepackReader:
    """One pass over a tensor's parts."""

    def __init__(self, repack: AffineRepack) -> None:
        self._repack = repack
        parts, stored, target = repack.tensor.parts, repack.stored, repack.target
        self._cols = repack.tensor.matrix_shape[1]
        self._packed = PackedReader(parts["packed_weight"], stored, self._cols)
        self._scales = ScalesReader(parts["scales"], stored)
        self._zeros = ScalesReader(parts["zeros"], stored) if stored.zeros else None
        self._mask = _row_mask(target.bits, self._cols, flip=False)
        self._flip = _row_mask(target.bits, self._cols, flip=True) if stored.signed != target.signed else None
        self._shared = False

    def read(self, rows: int) -> dict[str, Array]:
        scales = self._next(self._scales, rows)
        parts = {"packed_weight": self._codes(rows), "scales": cast(scales, self._repack.scale_dtype)}
        if self._zeros is not None:
            parts["zeros"] = self._repack.shift(self._next(self._zeros, rows))
        elif self._repack.target.zeros:
            parts["zeros"] = self._repack.new_zeros(scales.size)
        self._shared = self._repack.stored.granularity == "tensor"
        return parts

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
        matrix = self._packed.next(rows).reshape(rows, -1)[:, : self._mask.size]  # words may be longer
        if stored.msb:
            matrix = _mirrored(matrix, stored.bits, self._cols)
        matrix = matrix.copy() if self._flip is None else matrix ^ self._flip
        matrix[:, -1] &= self._mask[-1]
        if target.in_rows(self._cols):
            return matrix
        return join_rows(matrix, self._cols * target.bits)


def repacks(tensor: Tensor, stored: AffineParams) -> Iterator[AffineRepack]:
    """Yield what a tensor with these checked parameters can be repacked as, the one nearest to as stored first.

    Codes keep their sign or change it, in rows or, where these do not fill their bytes, without padding; scales become
    f32 where that lets more zero points be shifted. A zero point for all codes becomes a part where the attribute is
    not taken. Offsets keep the sign: a shifted one is not exact. Blocks, and codes packed as another matrix than the
    tensor's own, are not repacked.
    """
    if tensor.dtype not in FLOATS or stored.matrix is not None or stored.block is not None:
        return
    stored_type, cols = tensor.parts["scales"].dtype, tensor.matrix_shape[1]
    in_rows = replace(stored, packing="rows_lsb", dtype=tensor.dtype)
    flat = replace(in_rows, packing="flat_lsb")
    packings = (in_rows,) if flat.in_rows(cols) else (in_rows, flat)
    if stored.zero_point is not None:
        yield from (AffineRepack(tensor, stored, packing, stored_type) for packing in packings)
    in_part = stored.zeros or stored.zero_point is not None
    for signed in (stored.signed,) if stored.offset else (stored.signed, not stored.signed):
        flips = signed != stored.signed
        for scale_dtype in dict.fromkeys((stored_type, "f32") if flips and stored.zeros else (stored_type,)):
            for packing in packings:
                target = replace(packing, signed=signed, zeros=in_part or flips, zero_point=None)
                yield AffineRepack(tensor, stored, target, scale_dtype)


def _shifted(zeros: Array, delta: float, dtype: str) -> Array | None:
    """Return ``zeros + delta`` in ``dtype``; None unless each is exact. ``delta`` is a power of two from 1 to 128."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = zeros.astype(np.float64)
        moved = wide + delta
        out = moved.astype(numpy_dtype(dtype))
        exact = (np.abs(wide) <= _MOST_ZERO) & (moved - delta == wide) & (out.astype(np.float64) == moved)
    return out if bool(exact.all()) else None


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
