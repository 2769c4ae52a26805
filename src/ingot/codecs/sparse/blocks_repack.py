"""Repacking of a pruned tensor: the mask is unchanged, and the inner codec repacks the remaining matrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ingot.codecs.base import Repacked
from ingot.model.layouts.sparse import MASK, BlocksLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

Mask = Callable[[], bytes]


def repack(tensor: Tensor, layout: BlocksLayout, inner: Repacked, mask: Mask) -> Repacked:
    """Return the repacking of a pruned tensor into ``layout``.

    ``inner`` is the repacking of the remaining matrix; ``mask`` reads and checks the mask.
    """
    parts = (PartSpec(MASK, "u8", tensor.parts[MASK].nbytes), *inner.parts)

    def reader() -> BlocksRepackReader:
        return BlocksRepackReader(inner, mask)

    return Repacked(layout, parts, inner.rows, inner.step, inner.memory, inner.why_not, reader, inner.rounded)


class BlocksRepackReader:
    """A reader that returns the parts of the inner reader, and the mask with the first chunk."""

    def __init__(self, inner: Repacked, mask: Mask) -> None:
        self._mask: Array | None = np.frombuffer(mask(), np.uint8)
        self._reader = inner.reader()

    def read(self, rows: int) -> dict[str, Array]:
        parts = self._reader.read(rows)
        mask = self._mask
        self._mask = None
        return parts if mask is None else {MASK: mask, **parts}

    def finish(self) -> None:
        self._reader.finish()
