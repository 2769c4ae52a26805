"""Repacking a pruned tensor: the mask as it is, what is left as the inner codec repacks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import Repack
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

Mask = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class BlocksRepack:
    """``inner`` repacks the matrix of kept rows or columns; ``mask`` reads and checks the mask."""

    tensor: Tensor
    inner: Repack
    mask: Mask
    codec: str = "sparse_blocks"

    @property
    def params(self) -> Mapping[str, Any]:
        return {**self.tensor.params, "inner": self.inner.codec, "inner_params": dict(self.inner.params)}

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        return (PartSpec("mask", "u8", self.tensor.parts["mask"].nbytes), *self.inner.parts)

    @property
    def rows(self) -> int:
        return self.inner.rows

    @property
    def step(self) -> int:
        return self.inner.step

    @property
    def memory(self) -> int:
        return self.inner.memory

    def exact(self) -> bool:
        return self.inner.exact()

    def reader(self) -> BlocksRepackReader:
        return BlocksRepackReader(self)


class BlocksRepackReader:
    """The mask, then what the inner reader gives."""

    def __init__(self, repack: BlocksRepack) -> None:
        self._mask: Array | None = np.frombuffer(repack.mask(), np.uint8)
        self._reader = repack.inner.reader()

    def read(self, rows: int) -> dict[str, Array]:
        parts, mask = self._reader.read(rows), self._mask
        self._mask = None
        return parts if mask is None else {"mask": mask, **parts}

    def finish(self) -> None:
        self._reader.finish()
