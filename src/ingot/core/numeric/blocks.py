"""The mask of structured pruning, which drops blocks of channels (``spec/sparse_blocks.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def block_count(channels: int, block: int) -> int:
    """Return the number of blocks of ``block`` channels; the last one may be shorter."""
    return -(-channels // block)


def mask_bytes(channels: int, block: int) -> int:
    """Return the number of bytes of a mask with one bit per block of ``block`` channels."""
    return -(-block_count(channels, block) // 8)


@dataclass(frozen=True)
class Blocks:
    """A mask that selects the kept blocks of channels.

    Parameters
    ----------
    channels : int
        The number of channels.
    block : int
        The number of channels of a block.
    mask : bytes
        One bit per block, least significant first, 1 for a kept block; ``mask_bytes(channels, block)`` bytes.
    """

    channels: int
    block: int
    mask: bytes

    @staticmethod
    def from_flags(channels: int, block: int, flags: Sequence[bool]) -> Blocks:
        """Return the mask for ``flags``, which state for each block whether it is kept."""
        return Blocks(channels, block, np.packbits(np.asarray(flags, bool), bitorder="little").tobytes())

    @property
    def count(self) -> int:
        """The number of blocks, kept and dropped."""
        return block_count(self.channels, self.block)

    @property
    def has_spare_bits(self) -> bool:
        """Whether a bit past the last block is set."""
        return bool(self._bits()[self.count :].any())

    @property
    def kept_channels(self) -> int:
        """The number of channels in kept blocks."""
        return sum(stop - start for start, stop in self.spans())

    @property
    def sparsity(self) -> float:
        """The fraction of channels in dropped blocks, 0 to 1."""
        return 1 - self.kept_channels / self.channels if self.channels else 0.0

    def spans(self) -> list[tuple[int, int]]:
        """Return the kept channels as ascending ranges (start, stop); neighbouring blocks are joined."""
        bits = np.concatenate([[0], self._bits()[: self.count], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(bits)).reshape(-1, 2) * self.block
        return [(int(start), min(int(stop), self.channels)) for start, stop in edges]

    def _bits(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")


def clip_spans(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of ascending ranges between ``start`` and ``stop``."""
    cut = [(max(first, start), min(last, stop)) for first, last in spans if first < stop and last > start]
    return [(first, last) for first, last in cut if first < last]
