"""ggml's blocks of integers as affine integers, and back (``spec/gguf.md``, "Repacking"): no value goes through floats.

Blocks are taken apart into the affine layout that they are (``families.AFFINE``), and put together from it; what the
affine family does with its own layouts lies between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingot.codecs.affine.offset import offsets
from ingot.codecs.affine.offset import repack as affine_repack
from ingot.codecs.affine.repack import AffineRepack, difference, pieces
from ingot.codecs.base import Repacked, cannot
from ingot.core import native
from ingot.core.floats import cast
from ingot.core.parallel import for_ranges
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, OFFSETS, POINTS, ROWS_LSB, SCALES, ZEROS, AffineLayout, Constant
from ingot.model.layouts.base import Layout
from ingot.model.layouts.families import AFFINE
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.part import CHUNK, memory_part
from ingot.model.tensor import Array, Tensor

_COLUMNS = 32
_STEP = 1 << 15  # blocks that a thread takes at a time


def unpack(kind: str, blocks: Array) -> dict[str, Array]:
    """Take blocks (u8) apart: codes in ``rows_lsb``, scales and, where the type has them, offsets, in f16."""
    own = AFFINE[kind]
    nbytes = GgmlBlocksLayout(kind).block.nbytes
    count, width = blocks.size // nbytes, _COLUMNS * own.bits // 8
    codes, scales = np.empty(count * width, np.uint8), np.empty(count, np.uint16)
    minima = np.empty(count, np.uint16) if own.zeros else None

    def run(start: int, stop: int) -> None:
        native.kernels.ggml_unpack(
            kind,
            blocks[start * nbytes : stop * nbytes],
            codes[start * width : stop * width],
            scales[start:stop],
            None if minima is None else minima[start:stop],
        )

    for_ranges(count, _STEP, run)
    parts: dict[str, Array] = {CODES: codes, SCALES: scales.view(np.float16)}
    return parts if minima is None else {**parts, ZEROS: minima.view(np.float16)}


def pack(kind: str, codes: Array, scales: Array, minima: Array | None) -> Array:
    """Put blocks (u8) together from what ``unpack`` returns."""
    nbytes, width = GgmlBlocksLayout(kind).block.nbytes, _COLUMNS * AFFINE[kind].bits // 8
    blocks, bits = np.empty(scales.size * nbytes, np.uint8), scales.view(np.uint16)
    low = None if minima is None else minima.view(np.uint16)

    def run(start: int, stop: int) -> None:
        native.kernels.ggml_pack(
            kind,
            codes[start * width : stop * width],
            bits[start:stop],
            None if low is None else low[start:stop],
            blocks[start * nbytes : stop * nbytes],
        )

    for_ranges(scales.size, _STEP, run)
    return blocks


def from_blocks(tensor: Tensor, stored: GgmlBlocksLayout, target: Layout) -> Repacked:
    """Return a checked tensor of blocks in an affine layout; reads it where only its scales tell whether that is exact.

    They do where zero points become offsets.
    """
    own = AFFINE.get(stored.type)
    if own is None or not isinstance(target, AffineLayout):
        return cannot(target, f"blocks of {stored.type} are no integers with a scale that {target.codec} has")
    reason = difference(own, target)
    if reason is not None:
        return cannot(target, reason)
    blocks = _FromBlocks(tensor, stored, own, target)
    rows, cols = tensor.matrix_shape
    memory = 10 * blocks.row_bytes + 64 * (cols // _COLUMNS)
    why_not = blocks.why_not() if target.offset and not own.offset else None
    return Repacked(
        target, target.part_specs(tensor.shape), rows if cols else 0, 1, memory, why_not, lambda: _BlockParts(blocks)
    )


@dataclass(frozen=True, slots=True)
class _FromBlocks:
    tensor: Tensor
    stored: GgmlBlocksLayout
    own: AffineLayout
    target: AffineLayout

    @property
    def row_bytes(self) -> int:
        return self.tensor.matrix_shape[1] // self.stored.block.elements * self.stored.block.nbytes

    def chunk(self, rows: int, blocks: Array) -> Tensor:
        """Return rows of blocks as an affine tensor in memory."""
        parts = unpack(self.stored.type, blocks)
        found = {
            spec.role: memory_part(parts[spec.role], spec.dtype)
            for spec in self.own.part_specs((rows, self.tensor.matrix_shape[1]))
        }
        return Tensor.from_parts(self.own, found, (rows, self.tensor.matrix_shape[1]), self.tensor.name)

    def why_not(self) -> str | None:
        """Why not every value stays; reads all blocks and checks their digest."""
        reader, why_not = self.tensor.parts[BLOCKS].reader(), None
        rows, cols = self.tensor.matrix_shape
        step = max(1, CHUNK // max(self.row_bytes, 1))
        for start in range(0, rows if cols else 0, step):
            count = min(step, rows - start)
            blocks = np.empty(count * self.row_bytes, np.uint8)
            reader.readinto(blocks.data)
            why_not = why_not or affine_repack(self.chunk(count, blocks), self.own, self.target).why_not
        reader.finish()
        return why_not


class _BlockParts:
    """One pass over blocks, of which affine parts come."""

    def __init__(self, blocks: _FromBlocks) -> None:
        self._blocks = blocks
        self._reader = blocks.tensor.parts[BLOCKS].reader()

    def read(self, rows: int) -> dict[str, Array]:
        blocks = self._blocks
        raw = np.empty(rows * blocks.row_bytes, np.uint8)
        self._reader.readinto(raw.data)
        if blocks.target == blocks.own:
            return unpack(blocks.stored.type, raw)
        chunk = affine_repack(blocks.chunk(rows, raw), blocks.own, blocks.target)
        if not chunk.exact:  # ``why_not`` saw others
            raise _changed(blocks.tensor)
        return chunk.reader().read(rows)

    def finish(self) -> None:
        self._reader.finish()


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
        low = None if minima is None or not self.own.offset else _as_f16(minima)
        high = _as_f16(scales)
        if high is None or (self.own.offset and low is None):
            return "a scale or offset is no number of f16, which blocks have"
        return high, low

    def why_not(self) -> str | None:
        """Why not every value stays."""
        points = self.points
        why_not = points.why_not()
        if why_not is not None:
            return why_not
        zeros = pieces(self.tensor.parts[ZEROS]) if self.stored.zeros else None
        for part in pieces(self.tensor.parts[SCALES]):
            scales = cast(part, "f32")
            found = self.numbers(scales, points.new_zeros(scales.size) if zeros is None else points.shift(next(zeros)))
            why_not = why_not or (found if isinstance(found, str) else None)
        for _ in zeros or ():  # to the end, where the digest is checked
            pass
        return why_not


class _AffineBlocks:
    """One pass over affine parts, of which blocks come."""

    def __init__(self, blocks: _ToBlocks) -> None:
        self._blocks, self._inner = blocks, blocks.points.reader()
        cols = blocks.tensor.matrix_shape[1]
        self._groups = blocks.stored.scale_shape(1, cols)[-1]
        starts = np.arange(0, cols, _COLUMNS)
        self._group_of = starts // blocks.stored.group_columns(cols)

    def read(self, rows: int) -> dict[str, Array]:
        blocks, parts = self._blocks, self._inner.read(rows)
        found = blocks.numbers(parts[SCALES].reshape(-1), parts[ZEROS].reshape(-1))
        if isinstance(found, str):  # ``why_not`` saw others
            raise _changed(blocks.tensor)
        codes = np.ascontiguousarray(parts[CODES]).reshape(-1)
        if blocks.own.signed and not blocks.between.signed:
            codes = codes ^ np.uint8(0x80)
        scales, minima = found
        low = None if minima is None else self._spread(minima)
        return {BLOCKS: pack(blocks.target.type, codes, self._spread(scales), low)}

    def _spread(self, numbers: Array) -> Array:
        """Return a number for each block, where one stands for several."""
        if self._groups == self._group_of.size:
            return numbers
        return np.ascontiguousarray(numbers.reshape(-1, self._groups)[:, self._group_of]).reshape(-1)

    def finish(self) -> None:
        self._inner.finish()


def _as_f16(numbers: Array) -> Array | None:
    """Return f32 numbers as f16; None unless each is the same."""
    with np.errstate(over="ignore", invalid="ignore"):
        small = numbers.astype(np.float16)
        same = (small.astype(np.float32) == numbers) | np.isnan(numbers)
    return small if bool(same.all()) else None


def _changed(tensor: Tensor) -> IntegrityError:
    return IntegrityError(
        "store.changed",
        "expected the scales that were read before, found others: the source changed",
        where=tensor.name,
    )
