"""ggml's blocks in layouts of other families: they are taken apart, and that family does the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.repack import AffineRepack
from ingot.codecs.affine.to_words import in_words
from ingot.codecs.affine.windows import Windows, computed_part
from ingot.codecs.base import Repacked, cannot
from ingot.codecs.blocks.apart import STRANGE, changed, strange, taken, unpack
from ingot.codecs.scaled_codebook.codec import ScaledCodebookCodec
from ingot.core.buffers import scratch
from ingot.core.dtypes import file_bytes
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Layout
from ingot.model.layouts.families import OWN
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import CODEBOOK, SECOND, ScaledCodebookLayout
from ingot.model.layouts.words import WordsLayout
from ingot.model.part import CHUNK, Part, memory_part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

_ONCE = (CODEBOOK, SECOND)  # what a tensor has once, and each chunk taken for a tensor too


def from_blocks(tensor: Tensor, stored: GgmlBlocksLayout, target: Layout) -> Repacked:
    """Return a checked tensor of blocks in another layout, or why not.

    Reads it where only its scales tell whether that is exact: where zero points become offsets or these zero points,
    and where bytes of scales mean something else in blocks than elsewhere.
    """
    own = OWN.get(stored.type)
    if own is None:
        return cannot(target, f"blocks of {stored.type} are no codes with scales that {target.codec} has")
    blocks = _Blocks(tensor, stored, own)
    cols = tensor.matrix_shape[1]
    found = blocks.repacked(blocks.whole(), target)
    reason = blocks.strange() if found.exact else None
    if not found.exact or reason:
        return found if reason is None else cannot(target, reason)
    numbers = sum(part.length or 0 for part in own.part_specs((1, cols)))
    apart = blocks.row_bytes + 2 * numbers  # as read, and taken apart
    if isinstance(target, WordsLayout) and isinstance(own, AffineLayout) and target.turned:
        plain = AffineRepack(blocks.whole(), own, target.rows)
        return in_words(plain, lambda: _BlockParts(blocks, target.rows), target, None, apart)
    memory = found.memory + apart
    return replace(found, rows=found.rows if cols else 0, memory=memory, reader=lambda: _BlockParts(blocks, target))


def taken_apart(tensor: Tensor) -> Tensor | None:
    """Return a checked tensor of blocks in its layout of another family, whose parts are made as they are read.

    None where it has none, or where a scale means something else there; to know, blocks of small floats are read.
    """
    stored = GgmlBlocksLayout.of(tensor)
    own = OWN.get(stored.type)
    blocks = None if own is None else _Blocks(tensor, stored, own)
    return None if blocks is None or blocks.strange() else blocks.whole()


@dataclass(frozen=True, slots=True)
class _Blocks:
    tensor: Tensor
    stored: GgmlBlocksLayout
    own: AffineLayout | ScaledCodebookLayout

    @property
    def row_bytes(self) -> int:
        return self.tensor.matrix_shape[1] // self.stored.block.elements * self.stored.block.nbytes

    def whole(self) -> Tensor:
        """Return the tensor in its own layout of the other family; its parts are made as they are read."""
        rows = self.tensor.matrix_shape[0]
        source = Windows(self.tensor.parts[BLOCKS], rows, self.row_bytes)

        def made(spec: PartSpec) -> Part:
            def make(first: int, last: int) -> Array:
                blocks = np.ascontiguousarray(source.read(slice(first, last), 0, self.row_bytes)).reshape(-1)
                return np.frombuffer(file_bytes(taken(self.stored.type, blocks, spec.role)), np.uint8)

            width = (spec.length or 0) // max(rows, 1)
            return replace(computed_part(self.tensor.parts[BLOCKS], spec.dtype, rows, width, make), type=spec.type)

        parts = {spec.role: made(spec) for spec in self.own.part_specs(self.tensor.shape)}
        return Tensor.from_parts(self.own, parts, self.tensor.shape, self.tensor.name)

    def rows(self, shape: tuple[int, ...], blocks: Array) -> Tensor:
        """Return rows of blocks as a tensor in memory, in its own layout of the other family."""
        made = unpack(self.stored.type, blocks)
        parts = {spec.role: memory_part(made[spec.role], spec.dtype, spec.type) for spec in self.own.part_specs(shape)}
        return Tensor.from_parts(self.own, parts, shape, self.tensor.name)

    def strange(self) -> str | None:
        """Return why a scale's byte means something else outside of blocks; reads all and checks their digest."""
        rows, cols = self.tensor.matrix_shape
        if self.stored.type not in STRANGE or not rows * cols:
            return None
        reader, why_not, (elements, nbytes, _) = self.tensor.parts[BLOCKS].reader(), None, self.stored.block
        scales, left = self.own.part_specs((1, elements))[1].length, rows * self.row_bytes
        while left:
            raw = np.empty(min(left, max(1, CHUNK // nbytes) * nbytes), np.uint8)
            reader.readinto(raw.data)
            why_not = why_not or strange(self.stored.type, raw.reshape(-1, nbytes)[:, :scales])
            left -= raw.size
        reader.finish()
        return why_not

    def repacked(self, apart: Tensor, target: Layout) -> Repacked:
        """Return what is taken apart in the layout wanted."""
        if isinstance(self.own, ScaledCodebookLayout):
            return ScaledCodebookCodec().repack(apart, target)
        return AffineCodec().repack(apart, target)


class _BlockParts:
    """One pass over blocks, of which another layout's parts come."""

    def __init__(self, blocks: _Blocks, target: Layout) -> None:
        self._blocks, self._target = blocks, target
        self._reader = blocks.tensor.parts[BLOCKS].reader()
        self._begun = False

    def read(self, rows: int) -> dict[str, Array]:
        blocks = self._blocks
        raw = scratch((rows * blocks.row_bytes,), np.uint8)
        self._reader.readinto(raw.data)
        if self._target == blocks.own:
            return unpack(blocks.stored.type, raw)
        chunk = blocks.repacked(blocks.rows((rows, blocks.tensor.matrix_shape[1]), raw), self._target)
        if not chunk.exact:  # all of them were, when they were read before
            raise changed(blocks.tensor)
        parts, first = chunk.reader().read(rows), not self._begun
        self._begun = True
        return {role: part if first or role not in _ONCE else part[:0] for role, part in parts.items()}

    def finish(self) -> None:
        self._reader.finish()
