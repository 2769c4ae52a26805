"""Affine integers as ggml's blocks (``spec/gguf.md``, "Repacking"): no value goes through floats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingot.codecs.affine.offset import offsets
from ingot.codecs.affine.repack import AffineRepack, difference, number_chunks
from ingot.codecs.base import Repacked, cannot
from ingot.codecs.blocks.apart import as_f16, changed, pack
from ingot.core.floats import cast
from ingot.model.layouts.affine import CODES, OFFSETS, POINTS, ROWS_LSB, SCALES, ZEROS, AffineLayout, Constant
from ingot.model.layouts.families import AFFINE
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.tensor import Array, Tensor

_COLUMNS = 32


def to_blocks(tensor: Tensor, stored: AffineLayout, target: GgmlBlocksLayout) -> Repacked:
    """Return a checked affine tensor in blocks, or why not; reads scales and zero points, and checks their digests."""
    rows, cols = tensor.matrix_shape
    own = AFFINE.get(target.type)
    if own is None or cols % _COLUMNS or stored.per_tensor:
        return cannot(target, f"integers are no blocks of {target.type}")
    if not stored.block and stored.group_columns(cols) % _COLUMNS:
        return cannot(target, f"blocks of {target.type} have a scale for 32 columns, found groups that cross them")
    blocks = _ToBlocks(tensor, stored, own, target)
    reason = difference(stored, blocks.between)
    if reason is not None:
        return cannot(target, reason)
    memory = blocks.points.memory + target.block.nbytes * (cols // _COLUMNS) * 3
    return Repacked(
        target,
        target.part_specs(tensor.shape),
        rows if cols else 0,
        blocks.points.step,
        memory,
        blocks.why_not(),
        lambda: _AffineBlocks(blocks),
        again=blocks.points.again,
    )


@dataclass(frozen=True, slots=True)
class _ToBlocks:
    tensor: Tensor
    stored: AffineLayout
    own: AffineLayout
    target: GgmlBlocksLayout

    @property
    def between(self) -> AffineLayout:
        """The affine layout that blocks are put together from: scales in f32, and a zero point or offset for each."""
        stored = self.stored
        signed = self.own.signed and not stored.offset
        return replace(stored, packing=ROWS_LSB, signed=signed, scales="f32", zero=OFFSETS if stored.offset else POINTS)

    @property
    def points(self) -> AffineRepack:
        return AffineRepack(self.tensor, self.stored, self.between)

    @property
    def point(self) -> int:
        """The zero point that blocks without offsets have, of unsigned codes where ``between`` has these."""
        if isinstance(self.own.zero, Constant):
            return self.own.zero.point
        return 0 if self.between.signed else 128

    def numbers(self, scales: Array, zeros: Array) -> tuple[Array, Array | None] | str:
        """Return the scales and offsets of blocks in f16, or why there are none."""
        minima: Array | None = zeros if self.stored.offset else None
        if self.own.offset and minima is None:
            minima = offsets(scales, zeros)
            if minima is None:
                return "an offset, -scale * zero point, is no number of f32 that keeps every value"
        if not self.own.offset:
            wanted = scales * np.float32(-self.point) if self.stored.offset else np.float32(self.point)
            if not bool((zeros == wanted).all()):
                kind = "offset -scale *" if self.stored.offset else "zero point"
                return f"blocks of {self.target.type} have the {kind} {self.point}, found another"
        low = None if minima is None or not self.own.offset else as_f16(minima)
        high = as_f16(scales)
        if high is None or (self.own.offset and low is None):
            return "a scale or offset is no number of f16, which blocks have"
        return high, low

    def why_not(self) -> str | None:
        """Return why not every value stays."""
        points = self.points
        why_not = points.why_not()
        if why_not is not None:
            return why_not
        if not self.stored.zeros and not self.own.offset and self.stored.scales == "f16":  # any scale will do
            found = self.numbers(np.ones(1, np.float32), points.new_zeros(1))
            return found if isinstance(found, str) else None
        zeros = number_chunks(self.tensor.parts[ZEROS]) if self.stored.zeros else None
        for part in number_chunks(self.tensor.parts[SCALES]):
            scales = cast(part, "f32")
            found = self.numbers(scales, points.new_zeros(scales.size) if zeros is None else points.shift(next(zeros)))
            why_not = why_not or (found if isinstance(found, str) else None)
        for _ in zeros or ():  # to the end, where the digest is checked
            pass
        return why_not


class _AffineBlocks:
    """One pass over affine parts, of which blocks come."""

    def __init__(self, blocks: _ToBlocks) -> None:
        self._blocks, self._inner = blocks, blocks.points.reusing_reader()
        cols = blocks.tensor.matrix_shape[1]
        self._groups = blocks.stored.scale_shape(1, cols)[-1]
        starts = np.arange(0, cols, _COLUMNS)
        self._group_of = starts // blocks.stored.group_columns(cols)

    def read(self, rows: int) -> dict[str, Array]:
        blocks, parts = self._blocks, self._inner.read(rows)
        found = blocks.numbers(parts[SCALES].reshape(-1), parts[ZEROS].reshape(-1))
        if isinstance(found, str):  # ``why_not`` saw others
            raise changed(blocks.tensor)
        codes = np.ascontiguousarray(parts[CODES]).reshape(-1)
        if blocks.own.signed and not blocks.between.signed:
            codes = codes ^ np.uint8(0x80)
        scales, minima = found
        low = None if minima is None else self._spread(minima)
        made = {CODES: codes, SCALES: self._spread(scales), **({} if low is None else {ZEROS: low})}
        return {BLOCKS: pack(blocks.target.type, made)}

    def _spread(self, numbers: Array) -> Array:
        """Return a number for each block, where one stands for several."""
        if self._groups == self._group_of.size:
            return numbers
        return np.ascontiguousarray(numbers.reshape(-1, self._groups)[:, self._group_of]).reshape(-1)

    def finish(self) -> None:
        self._inner.finish()
