"""Exact repacking of affine integers into ggml's blocks (``spec/gguf.md``, "Repacking")."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingot.codecs.affine.offset import offsets
from ingot.codecs.affine.repack import AffineRepack, difference, number_chunks
from ingot.codecs.base import Repacked, cannot
from ingot.codecs.blocks.apart import as_f16, pack, source_changed
from ingot.core.numeric.dtypes import cast
from ingot.model.layouts.affine import CODES, OFFSETS, POINTS, ROWS_LSB, SCALES, ZEROS, AffineLayout, Constant
from ingot.model.layouts.alternatives import AFFINE
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.tensor import Array, Tensor

_COLUMNS = 32


def to_blocks(tensor: Tensor, stored: AffineLayout, target: GgmlBlocksLayout) -> Repacked:
    """Return the repacking of an affine tensor into ggml's blocks, or the reason why it is impossible.

    Scales and zero points are read, and their digests checked.
    """
    rows, cols = tensor.matrix_shape
    layout = AFFINE.get(target.type)
    if layout is None or cols % _COLUMNS or stored.per_tensor:
        return cannot(target, f"blocks of {target.type} cannot store these integers")
    if not stored.block and stored.group_columns(cols) % _COLUMNS:
        return cannot(target, f"blocks of {target.type} have a scale for 32 columns, found groups that cross them")
    blocks = _ToBlocks(tensor, stored, layout, target)
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
    layout: AffineLayout
    target: GgmlBlocksLayout

    @property
    def between(self) -> AffineLayout:
        """The affine layout that is packed into blocks: f32 scales, and a zero point or offset per scale."""
        stored = self.stored
        signed = self.layout.signed and not stored.offset
        return replace(stored, packing=ROWS_LSB, signed=signed, scales="f32", zero=OFFSETS if stored.offset else POINTS)

    @property
    def points(self) -> AffineRepack:
        return AffineRepack(self.tensor, self.stored, self.between)

    @property
    def point(self) -> int:
        """The zero point of all blocks of a type without offsets, for the codes of ``between``."""
        if isinstance(self.layout.zero, Constant):
            return self.layout.zero.point
        return 0 if self.between.signed else 128

    def numbers(self, scales: Array, zeros: Array) -> tuple[Array, Array | None] | str:
        """Return the scales and offsets of blocks in f16, or a text that says why f16 cannot represent them exactly."""
        minima: Array | None = zeros if self.stored.offset else None
        if self.layout.offset and minima is None:
            minima = offsets(scales, zeros)
            if minima is None:
                return "f32 cannot represent an offset, -scale * zero point, without changing a value"
        if not self.layout.offset:
            expected = scales * np.float32(-self.point) if self.stored.offset else np.float32(self.point)
            if not bool((zeros == expected).all()):
                term = "offset -scale *" if self.stored.offset else "zero point"
                return f"blocks of {self.target.type} have the {term} {self.point}, found another"
        low = None if minima is None or not self.layout.offset else as_f16(minima)
        high = as_f16(scales)
        if high is None or (self.layout.offset and low is None):
            return "f16, the type of numbers in blocks, cannot represent a scale or offset exactly"
        return high, low

    def why_not(self) -> str | None:
        """Return why a value would change; None if none changes."""
        points = self.points
        why_not = points.why_not()
        if why_not is not None:
            return why_not
        if not self.stored.zeros and not self.layout.offset and self.stored.scales == "f16":  # independent of scales
            numbers = self.numbers(np.ones(1, np.float32), points.new_zeros(1))
            return numbers if isinstance(numbers, str) else None
        zeros = number_chunks(self.tensor.parts[ZEROS]) if self.stored.zeros else None
        for part in number_chunks(self.tensor.parts[SCALES]):
            scales = cast(part, "f32")
            numbers = self.numbers(
                scales, points.new_zeros(scales.size) if zeros is None else points.shift(next(zeros))
            )
            why_not = why_not or (numbers if isinstance(numbers, str) else None)
        for _ in zeros or ():  # to the end, where the digest is checked
            pass
        return why_not


class _AffineBlocks:
    """A reader that packs affine parts into blocks."""

    def __init__(self, blocks: _ToBlocks) -> None:
        self._blocks = blocks
        self._inner = blocks.points.reusing_reader()
        cols = blocks.tensor.matrix_shape[1]
        self._groups = blocks.stored.scale_shape(1, cols)[-1]
        starts = np.arange(0, cols, _COLUMNS)
        self._group_of = starts // blocks.stored.group_columns(cols)

    def read(self, rows: int) -> dict[str, Array]:
        blocks = self._blocks
        parts = self._inner.read(rows)
        numbers = blocks.numbers(parts[SCALES].reshape(-1), parts[ZEROS].reshape(-1))
        if isinstance(numbers, str):  # other numbers than ``why_not`` checked
            raise source_changed(blocks.tensor)
        codes = np.ascontiguousarray(parts[CODES]).reshape(-1)
        if blocks.layout.signed and not blocks.between.signed:
            codes = codes ^ np.uint8(0x80)
        scales, minima = numbers
        low = None if minima is None else self._repeat(minima)
        block_parts = {CODES: codes, SCALES: self._repeat(scales), **({} if low is None else {ZEROS: low})}
        return {BLOCKS: pack(blocks.target.type, block_parts)}

    def _repeat(self, numbers: Array) -> Array:
        """Return one number per block, from one number per group."""
        if self._groups == self._group_of.size:
            return numbers
        return np.ascontiguousarray(numbers.reshape(-1, self._groups)[:, self._group_of]).reshape(-1)

    def finish(self) -> None:
        self._inner.finish()
