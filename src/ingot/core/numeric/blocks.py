"""Blocks of channels, some kept and some dropped: the mask of structured pruning (``spec/sparse_blocks.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def block_count(channels: int, block: int) -> int:
    """Return how many blocks of ``block`` channels there are; the last may be short."""
    return -(-channels // block)


def mask_bytes(channels: int, block: int) -> int:
    """Return the bytes of a mask of one bit per block."""
    return -(-block_count(channels, block) // 8)


@dataclass(frozen=True)
class Blocks:
    """Which blocks of ``block`` channels are kept.

    Parameters
    ----------
    channels, block : int
    mask : bytes
        ``mask_bytes(channels, block)`` of them: a bit per block, least significant first, 1 where it is kept.
    """

    channels: int
    block: int
    mask: bytes

    @staticmethod
    def of(channels: int, block: int, kept: Sequence[bool]) -> Blocks:
        """Make the mask of one truth value per block."""
        return Blocks(channels, block, np.packbits(np.asarray(kept, bool), bitorder="little").tobytes())

    @property
    def count(self) -> int:
        """Number of blocks."""
        return block_count(self.channels, self.block)

    @property
    def spare(self) -> bool:
        """Whether a bit past the last block is set."""
        return bool(self._bits()[self.count :].any())

    @property
    def kept(self) -> int:
        """Number of kept channels."""
        return sum(stop - start for start, stop in self.spans())

    @property
    def sparsity(self) -> float:
        """Share of the channels that is dropped, 0 to 1."""
        return 1 - self.kept / self.channels if self.channels else 0.0

    def spans(self) -> list[tuple[int, int]]:
        """Return the kept channels as ranges, ascending, neighbouring blocks joined."""
        bits = np.concatenate([[0], self._bits()[: self.count], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(bits)).reshape(-1, 2) * self.block
        return [(int(start), min(int(stop), self.channels)) for start, stop in edges]

    def _bits(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")


def spans_of(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return what of ascending ranges lies between ``start`` and ``stop``."""
    cut = [(max(first, start), min(last, stop)) for first, last in spans if first < stop and last > start]
    return [(first, last) for first, last in cut if first < last]
