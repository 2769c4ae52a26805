"""Repacking of ggml's blocks into other families: blocks are unpacked, then repacked by that family's codec."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.repack import AffineRepack
from ingot.codecs.affine.to_words import in_words
from ingot.codecs.affine.windows import Windows, computed_part
from ingot.codecs.base import Repacked, cannot
from ingot.codecs.blocks.apart import INCOMPATIBLE_SCALES, extract_part, source_changed, unpack, why_incompatible
from ingot.codecs.scaled_codebook.codec import ScaledCodebookCodec
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import file_bytes
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.alternatives import UNPACKED
from ingot.model.layouts.base import Layout
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.layouts.scaled_codebook import CODEBOOK, SECOND, ScaledCodebookLayout
from ingot.model.part import CHUNK, Part, memory_part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

_ONCE = (CODEBOOK, SECOND)  # parts of the full tensor; each chunk has them, because it is repacked like a tensor


def from_blocks(tensor: Tensor, stored: GgmlBlocksLayout, target: Layout) -> Repacked:
    """Return the repacking of a checked tensor of blocks into another layout, or the reason why it is impossible.

    The blocks are read if exactness depends on the scales. It does if zero points become offsets or the reverse, or if
    the other layout decodes some bytes of scales differently.
    """
    layout = UNPACKED.get(stored.type)
    if layout is None:
        return cannot(target, f"{target.codec} cannot store the codes and scales of blocks of {stored.type}")
    blocks = _Blocks(tensor, stored, layout)
    cols = tensor.matrix_shape[1]
    result = blocks.repack(blocks.as_tensor(), target)
    reason = blocks.why_incompatible() if result.exact else None
    if not result.exact or reason:
        return result if reason is None else cannot(target, reason)
    numbers = sum(part.length or 0 for part in layout.part_specs((1, cols)))
    row_memory = blocks.row_bytes + 2 * numbers  # as read, and unpacked
    if isinstance(target, PackedIntLayout) and isinstance(layout, AffineLayout) and target.transposed:
        plain = AffineRepack(blocks.as_tensor(), layout, target.rows)
        return in_words(plain, lambda: _BlockParts(blocks, target.rows), target, None, row_memory)
    memory = result.memory + row_memory
    return replace(result, rows=result.rows if cols else 0, memory=memory, reader=lambda: _BlockParts(blocks, target))


def unpack_blocks(tensor: Tensor) -> Tensor | None:
    """Return a checked tensor of blocks in the equivalent layout of another family, unpacked on access.

    Returns None if the block type has no equivalent layout, or if a scale has another value in that layout. If scales
    are small floats, all blocks are read to find such scales.
    """
    stored = GgmlBlocksLayout.from_tensor(tensor)
    layout = UNPACKED.get(stored.type)
    blocks = None if layout is None else _Blocks(tensor, stored, layout)
    return None if blocks is None or blocks.why_incompatible() else blocks.as_tensor()


@dataclass(frozen=True, slots=True)
class _Blocks:
    tensor: Tensor
    stored: GgmlBlocksLayout
    layout: AffineLayout | ScaledCodebookLayout

    @property
    def row_bytes(self) -> int:
        return self.tensor.matrix_shape[1] // self.stored.block.elements * self.stored.block.nbytes

    def as_tensor(self) -> Tensor:
        """Return the tensor in ``layout``; its parts are unpacked on access."""
        rows = self.tensor.matrix_shape[0]
        source = Windows(self.tensor.parts[BLOCKS], rows, self.row_bytes)

        def unpacked_part(spec: PartSpec) -> Part:
            def make(first: int, last: int) -> Array:
                blocks = np.ascontiguousarray(source.read(slice(first, last), 0, self.row_bytes)).reshape(-1)
                return np.frombuffer(file_bytes(extract_part(self.stored.type, blocks, spec.role)), np.uint8)

            width = (spec.length or 0) // max(rows, 1)
            return replace(computed_part(self.tensor.parts[BLOCKS], spec.dtype, rows, width, make), type=spec.type)

        parts = {spec.role: unpacked_part(spec) for spec in self.layout.part_specs(self.tensor.shape)}
        return Tensor.from_parts(self.layout, parts, self.tensor.shape, self.tensor.name)

    def rows(self, shape: tuple[int, ...], blocks: Array) -> Tensor:
        """Return ``blocks``, which contain consecutive rows, as a tensor in memory with ``shape`` and ``layout``."""
        arrays = unpack(self.stored.type, blocks)
        parts = {
            spec.role: memory_part(arrays[spec.role], spec.dtype, spec.type) for spec in self.layout.part_specs(shape)
        }
        return Tensor.from_parts(self.layout, parts, shape, self.tensor.name)

    def why_incompatible(self) -> str | None:
        """Return why a scale's byte has another value outside of blocks; None if all have the same value.

        All blocks are read, and their digest is checked.
        """
        rows, cols = self.tensor.matrix_shape
        if self.stored.type not in INCOMPATIBLE_SCALES or not rows * cols:
            return None
        reader, why_not, (elements, nbytes, _) = self.tensor.parts[BLOCKS].reader(), None, self.stored.block
        scales = self.layout.part_specs((1, elements))[1].length
        remaining = rows * self.row_bytes
        while remaining:
            raw = np.empty(min(remaining, max(1, CHUNK // nbytes) * nbytes), np.uint8)
            reader.readinto(raw.data)
            why_not = why_not or why_incompatible(self.stored.type, raw.reshape(-1, nbytes)[:, :scales])
            remaining -= raw.size
        reader.finish()
        return why_not

    def repack(self, unpacked: Tensor, target: Layout) -> Repacked:
        """Return the repacking of ``unpacked``, a tensor in this object's ``layout``, into the layout ``target``."""
        if isinstance(self.layout, ScaledCodebookLayout):
            return ScaledCodebookCodec().repack(unpacked, target)
        return AffineCodec().repack(unpacked, target)


class _BlockParts:
    """A reader that converts blocks to the parts of another layout."""

    def __init__(self, blocks: _Blocks, target: Layout) -> None:
        self._blocks = blocks
        self._target = target
        self._reader = blocks.tensor.parts[BLOCKS].reader()
        self._has_begun = False

    def read(self, rows: int) -> dict[str, Array]:
        blocks = self._blocks
        raw = scratch((rows * blocks.row_bytes,), np.uint8)
        self._reader.readinto(raw.data)
        if self._target == blocks.layout:
            return unpack(blocks.stored.type, raw)
        chunk = blocks.repack(blocks.rows((rows, blocks.tensor.matrix_shape[1]), raw), self._target)
        if not chunk.exact:  # other scales than those checked
            raise source_changed(blocks.tensor)
        parts, first = chunk.reader().read(rows), not self._has_begun
        self._has_begun = True
        return {role: part if first or role not in _ONCE else part[:0] for role, part in parts.items()}

    def finish(self) -> None:
        self._reader.finish()
