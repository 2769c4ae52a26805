"""Zero points as offsets: ``s * (q - z)`` repacked as ``s * q + o``, ``o = -s * z`` (``spec/affine.md``, "Repacking").

What computes with offsets (MLX) takes integers that were made with zero points, or with signed codes, as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.codecs.affine.encode import part_specs
from ingot.codecs.affine.params import AffineParams
from ingot.codecs.affine.repack import AffineRepack, AffineRepackReader
from ingot.core.dtypes import from_file, numpy_dtype
from ingot.errors import IntegrityError
from ingot.model.part import CHUNK, Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

_MOST_ZERO = 255.0
# Times a code or the difference of two it is still a number of float32.
_MOST_SCALE = 2.0**118


@dataclass(frozen=True, slots=True)
class OffsetRepack:
    """A tensor's integers, unsigned, low bits first, with offsets. ``points`` is the same with zero points."""

    points: AffineRepack
    codec: str = "quantized_group"

    @property
    def target(self) -> AffineParams:
        """Parameters of the result."""
        return replace(self.points.target, zero_kind="offset")

    @property
    def scale_dtype(self) -> str:
        """Type of scales and offsets."""
        return self.points.scale_dtype

    @property
    def params(self) -> Mapping[str, Any]:
        return self.target.attributes()

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        return part_specs(self.points.target, self.points.scale_dtype, *self.points.tensor.matrix_shape)

    @property
    def rows(self) -> int:
        return self.points.rows

    @property
    def step(self) -> int:
        return self.points.step

    @property
    def memory(self) -> int:
        return self.points.memory

    def exact(self) -> bool:
        """Whether every value has the same bits in f32; reads scales and zero points, and checks their digests."""
        if not self.points.exact():
            return False
        tensor, fits = self.points.tensor, True
        zeros = _chunks(tensor.parts["zeros"]) if self.points.stored.zeros else None
        for scales in _chunks(tensor.parts["scales"]):
            points = self.points.new_zeros(scales.size) if zeros is None else self.points.shift(next(zeros))
            fits = fits and offsets(scales, points) is not None
        for _ in zeros or ():  # to the end, where the digest is checked
            pass
        return fits

    def reader(self) -> OffsetRepackReader:
        return OffsetRepackReader(self)


class OffsetRepackReader:
    """One pass over a tensor's parts."""

    def __init__(self, repack: OffsetRepack) -> None:
        self._inner: AffineRepackReader = repack.points.reader()
        self._where = repack.points.tensor.name

    def read(self, rows: int) -> dict[str, Array]:
        parts = self._inner.read(rows)
        found = offsets(parts["scales"], parts["zeros"])
        if found is None:  # ``exact`` saw others
            raise IntegrityError(
                "store.changed",
                "expected the scales that were read before, found others: the source changed",
                where=self._where,
            )
        return {**parts, "zeros": found}

    def finish(self) -> None:
        self._inner.finish()


def offsets(scales: Array, zeros: Array) -> Array | None:
    """Return ``-scales * zeros`` in their type; None unless every value that they give keeps its bits.

    With at most 11 bits of a scale and 9 of an integer, every product and difference is a number of float32; what is
    left to prove is that the offset is one of the scales' type, and that no zero changes its sign.
    """
    if scales.dtype not in (numpy_dtype("f16"), numpy_dtype("bf16")):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        wide, points = scales.astype(np.float64), zeros.astype(np.float64)
        product = -wide * points
        found = product.astype(np.float32).astype(scales.dtype)
        fits = (wide > 0) & (wide < _MOST_SCALE) & (np.abs(points) <= _MOST_ZERO) & (points == np.rint(points))
        fits &= found.astype(np.float64) == product
    return found if bool(fits.all()) else None


def offset_repacks(points: Iterator[AffineRepack]) -> Iterator[AffineRepack | OffsetRepack]:
    """Yield repacks as they come, and at the end those with offsets that follow from them."""
    followed: dict[str, OffsetRepack] = {}
    for repack in points:
        yield repack
        target = repack.target
        plain = target.packing == "rows_lsb" and not target.signed and target.zeros and not target.offset
        if plain and repack.scale_dtype in ("f16", "bf16"):
            followed.setdefault(repack.scale_dtype, OffsetRepack(repack))
    yield from followed.values()


def _chunks(part: Part) -> Iterator[Array]:
    """Yield a part's numbers; its digest is checked at the end."""
    reader = part.reader()
    for start in range(0, part.nbytes, CHUNK):
        raw = np.empty(min(CHUNK, part.nbytes - start), np.uint8)
        reader.readinto(raw.data)
        yield from_file(raw, part.dtype)
    reader.finish()
