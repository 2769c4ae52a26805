"""Exact repacking of codebooks into ggml's blocks MXFP4, NVFP4 and IQ4_NL (``spec/gguf.md``, "Repacking")."""

from __future__ import annotations

from dataclasses import replace

from ingot.codecs.affine.repack import number_chunks
from ingot.codecs.base import Repacked, RepackReader, cannot
from ingot.codecs.blocks.apart import as_f16, pack, source_changed, why_incompatible
from ingot.codecs.scaled_codebook.repack import repack
from ingot.core.numeric.dtypes import cast
from ingot.model.layouts.alternatives import CODEBOOKS
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import INDICES, SCALES, ScaledCodebookLayout
from ingot.model.tensor import Array, Tensor


def to_blocks(tensor: Tensor, stored: ScaledCodebookLayout, target: GgmlBlocksLayout) -> Repacked:
    """Return the repacking of a checked tensor into ggml's blocks, or the reason why it is impossible.

    Scales are read, and their digest is checked.
    """
    layout = CODEBOOKS.get(target.type)
    rows, cols = tensor.matrix_shape
    if layout is None or cols % target.block.elements or stored.transposed:
        return cannot(target, f"blocks of {target.type} cannot store these indices and scales")
    floats = layout.scales == "f16"
    if not floats and stored.scales != layout.scales:
        return cannot(target, f"blocks of {target.type} have scales of {layout.scales}, found {stored.scales}")
    inner = repack(tensor, stored, replace(layout, dtype=stored.dtype, scales="f32" if floats else layout.scales))
    if not inner.exact:
        return cannot(target, inner.why_not or "")
    for scales in (
        () if floats and stored.scales == "f16" and not stored.nested else number_chunks(tensor.parts[SCALES])
    ):
        reason = why_incompatible(target.type, scales) if not floats else None
        if floats and (stored.nested or as_f16(cast(scales, "f32")) is None):
            reason = "f16, the type of scales in blocks, cannot represent a scale exactly"
        if reason is not None:
            return cannot(target, reason)
    memory = inner.memory + 3 * cols // target.block.elements * target.block.nbytes
    result = replace(
        inner, layout=target, parts=target.part_specs(tensor.shape), rows=rows if cols else 0, memory=memory
    )
    return replace(result, reader=lambda: _Blocks(tensor, target, inner.reader(), floats=floats))


class _Blocks:
    """A reader that packs indices and scales into blocks."""

    def __init__(self, tensor: Tensor, target: GgmlBlocksLayout, inner: RepackReader, *, floats: bool) -> None:
        self._tensor = tensor
        self._target = target
        self._inner = inner
        self._floats = floats

    def read(self, rows: int) -> dict[str, Array]:
        parts = self._inner.read(rows)
        scales: Array | None = parts[SCALES]
        if self._floats:
            scales = as_f16(parts[SCALES])
        if scales is None or why_incompatible(self._target.type, scales):  # other scales than those checked
            raise source_changed(self._tensor)
        return {BLOCKS: pack(self._target.type, {INDICES: parts[INDICES], SCALES: scales})}

    def finish(self) -> None:
        self._inner.finish()
