"""Codebooks as ggml's blocks: MXFP4, NVFP4 and IQ4_NL (``spec/gguf.md``, "Repacking"); no value goes through floats."""

from __future__ import annotations

from dataclasses import replace

from ingot.codecs.affine.repack import number_chunks
from ingot.codecs.base import Repacked, RepackReader, cannot
from ingot.codecs.blocks.apart import as_f16, changed, pack, strange
from ingot.codecs.scaled_codebook.repack import repack
from ingot.core.floats import cast
from ingot.model.layouts.families import CODEBOOKS
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import INDICES, SCALES, ScaledCodebookLayout
from ingot.model.tensor import Array, Tensor


def to_blocks(tensor: Tensor, stored: ScaledCodebookLayout, target: GgmlBlocksLayout) -> Repacked:
    """Return a checked tensor in blocks, or why not; reads scales, and checks their digest."""
    own = CODEBOOKS.get(target.type)
    rows, cols = tensor.matrix_shape
    if own is None or cols % target.block.elements or stored.transposed:
        return cannot(target, f"these indices and scales are no blocks of {target.type}")
    floats = own.scales == "f16"
    if not floats and stored.scales != own.scales:
        return cannot(target, f"blocks of {target.type} have scales of {own.scales}, found {stored.scales}")
    inner = repack(tensor, stored, replace(own, dtype=stored.dtype, scales="f32" if floats else own.scales))
    if not inner.exact:
        return cannot(target, inner.why_not or "")
    for scales in (
        () if floats and stored.scales == "f16" and not stored.nested else number_chunks(tensor.parts[SCALES])
    ):
        reason = strange(target.type, scales) if not floats else None
        if floats and (stored.nested or as_f16(cast(scales, "f32")) is None):
            reason = "a scale is no number of f16, which blocks have"
        if reason is not None:
            return cannot(target, reason)
    memory = inner.memory + 3 * cols // target.block.elements * target.block.nbytes
    made = replace(inner, layout=target, parts=target.part_specs(tensor.shape), rows=rows if cols else 0, memory=memory)
    return replace(made, reader=lambda: _Blocks(tensor, target, inner.reader(), floats=floats))


class _Blocks:
    """One pass over indices and scales, of which blocks come."""

    def __init__(self, tensor: Tensor, target: GgmlBlocksLayout, inner: RepackReader, *, floats: bool) -> None:
        self._tensor, self._target, self._inner, self._floats = tensor, target, inner, floats

    def read(self, rows: int) -> dict[str, Array]:
        parts = self._inner.read(rows)
        scales: Array | None = parts[SCALES]
        if self._floats:
            scales = as_f16(parts[SCALES])
        if scales is None or strange(self._target.type, scales):  # none was, when they were read before
            raise changed(self._tensor)
        return {BLOCKS: pack(self._target.type, {INDICES: parts[INDICES], SCALES: scales})}

    def finish(self) -> None:
        self._inner.finish()
