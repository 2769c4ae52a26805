"""Re-laying a pruned tensor: the mask as it is, what is left as the inner codec re-lays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import Relay
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

Mask = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class BlocksRelay:
    """``inner`` re-lays the matrix of kept rows or columns; ``mask`` reads and checks the mask."""

    tensor: Tensor
    inner: Relay
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

    def reader(self) -> BlocksRelayReader:
        return BlocksRelayReader(self)


class BlocksRelayReader:
    """The mask, then what the inner reader gives."""

    def __init__(self, relay: BlocksRelay) -> None:
        self._mask: Array | None = np.frombuffer(relay.mask(), np.uint8)
        self._reader = relay.inner.reader()

    def read(self, rows: int) -> dict[str, Array]:
        parts, mask = self._reader.read(rows), self._mask
        self._mask = None
        return parts if mask is None else {"mask": mask, **parts}

    def finish(self) -> None:
        self._reader.finish()
