"""Many small tensors of one file in columns of numbers: what reads them together, without an object for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.core.checksums import Buffer
from ingot.model.bytesource import ByteSource

Numbers = NDArray[np.int64]
Shape = tuple[int, ...]
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no bit of a size is lost


class Places(NamedTuple):
    """By row: where a part lies in the file, and how many bytes it has."""

    offsets: Numbers
    lengths: Numbers


class Digests(NamedTuple):
    """By row: where a part's digest lies as text in ``data``, below 0 for none, and how long it is."""

    data: Buffer
    begins: Numbers
    lengths: Numbers


@dataclass(frozen=True, slots=True)
class Bulk:
    """Where the parts of tensors of one codec lie in one file: raw, of storage types, of sizes that are right.

    Parameters
    ----------
    codec : str
        Of all tensors that are meant.
    source : ByteSource
        Of this machine.
    rows : mapping
        All tensors of the file by name, in order; the others are not meant.
    numbers : array of int32
        By row: the number in ``kinds``; -1 for a tensor that is not meant.
    kinds : sequence of (str, shape)
        Element types, of whole bytes, and shapes.
    parts : mapping of role to Places
        All parts that each of the tensors has.
    digests : Digests, optional
        Of the only part.
    verify : bool
        Whether digests are to be checked.
    """

    codec: str
    source: ByteSource
    rows: Mapping[str, int]
    numbers: NDArray[np.int32]
    kinds: Sequence[tuple[str, Shape]]
    parts: Mapping[str, Places]
    digests: Digests | None
    verify: bool

    @property
    def nbytes(self) -> Numbers:
        """By row: the bytes of all parts."""
        first, *others = (places.lengths for places in self.parts.values())
        return first if not others else np.sum([first, *others], axis=0, dtype=np.int64)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of all parts of tensors."""
        rows = self.rows_of(names)
        found: list[int] = np.sum([places.lengths[rows] for places in self.parts.values()], axis=0).tolist()
        return found

    def undigested(self, names: Sequence[str]) -> list[bool]:
        """Tell of tensors whether their parts have no digests."""
        if self.digests is None:
            return [True] * len(names)
        found: list[bool] = (self.digests.begins[self.rows_of(names)] < 0).tolist()
        return found

    def rows_of(self, names: Sequence[str]) -> Numbers:
        """Return the rows of tensors."""
        return np.fromiter(map(self.rows.__getitem__, names), np.int64, len(names))

    def counted(self, names: Iterable[str] | None) -> tuple[list[str], list[int], list[str]]:
        """Return a name of each kind among ``names``, by default all, how many there are of it, and names of others."""
        if names is None:
            chosen, rows = [*self.rows], np.fromiter(self.rows.values(), np.int64, len(self.rows))
        else:
            chosen = [*names]
            rows = self.rows_of(chosen)
        numbers = self.numbers[rows]
        found, first, counts = np.unique(numbers, return_index=True, return_counts=True)
        meant = found >= 0
        others = [chosen[at] for at in np.flatnonzero(numbers < 0)]
        return [chosen[at] for at in first[meant].tolist()], counts[meant].tolist(), others


def number_kinds(
    types: Numbers, names: Sequence[str], sizes: Numbers, starts: Numbers, meant: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], list[tuple[str, Shape]]]:
    """Return the number of each tensor's kind, -1 for tensors that are not meant, and the kinds.

    Parameters
    ----------
    types : array
        By row: which of ``names`` is the element type.
    sizes, starts : arrays
        Sizes of all tensors after each other; by row where its own begin, and the end.
    meant : array of bool
    """
    numbers = np.full(meant.size, -1, np.int32)
    kinds: list[tuple[str, Shape]] = []
    ranks = np.diff(starts)
    for rank in np.unique(ranks[meant]).tolist():
        rows = np.flatnonzero(meant & (ranks == rank))
        own = np.empty((rows.size, 1 + rank), np.int64)
        own[:, 0] = types[rows]
        own[:, 1:] = sizes[starts[rows, None] + np.arange(rank)]
        keys = np.zeros(rows.size, np.uint64)
        for column in own.T.view(np.uint64) if own.size else ():
            keys = (keys ^ column) * np.uint64(_FACTOR)
            keys ^= keys >> np.uint64(29)
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        same = (own == own[first[which]]).all(1)  # a file may be made so that other sizes have the same key
        numbers[rows[same]] = (len(kinds) + which)[same]
        kinds += [(names[row[0]], tuple(row[1:])) for row in own[first].tolist()]
    return numbers, kinds
