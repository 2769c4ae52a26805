"""What a comparison found of each tensor. Kept as columns: there may be very many."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np

from ingot.core.numeric.stats import ErrorStats
from ingot.model.reading.lazy import ComputedSequence

IDENTICAL = "identical"
EQUAL = "equal"
DIFFERS = "differs"
ONLY_A = "only in A"
ONLY_B = "only in B"
SHAPE = "shape differs"
UNKNOWN = "cannot decode"
_STATUSES = (ONLY_A, ONLY_B, SHAPE, UNKNOWN, DIFFERS, IDENTICAL, EQUAL)
_BADNESS = np.array([0, 0, 0, 0, 1, 2, 2], np.uint8)

# The fields of ErrorStats in order; as doubles and 64-bit integers they keep every bit.
_SUMS = Struct("=q5d2q")
_sums = attrgetter(*ErrorStats.__slots__)
_NO_SUMS = _SUMS.pack(-1, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One name in either checkpoint.

    ``status``: ``identical`` (same dtype and bits), ``equal`` (same values in another dtype), ``differs``, ``only in
    A``, ``only in B``, ``shape differs`` or ``cannot decode``. ``stats`` is there where values could be compared as
    numbers.
    """

    name: str
    status: str
    detail: str = ""
    stats: ErrorStats | None = None

    @property
    def same(self) -> bool:
        return self.status in (IDENTICAL, EQUAL)


class Comparisons(ComputedSequence[TensorComparison]):
    """Comparisons, worst first; each is made when it is asked for, and not kept.

    First what is missing or misshapen, then what differs, then the equal; within each by rising signal-to-noise ratio
    (0 where there is none; last where squares were too large for one), then by name.
    """

    __slots__ = ("_columns", "_places")

    def __init__(self, found: Iterable[TensorComparison]) -> None:
        self._columns = _Columns()
        ratios = array("d")
        for item in found:
            self._columns.add(item)
            ratios.append(item.stats.snr_db if item.stats else 0.0)
        self._places = self._columns.worst_first(np.frombuffer(ratios))

    def __len__(self) -> int:
        return len(self._places)

    def _make(self, index: int) -> TensorComparison:
        return self._columns.item(int(self._places[index]))


class _Columns:
    """Comparisons in the order in which they were made."""

    __slots__ = ("_details", "_names", "_said", "_statuses", "_sums")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._statuses = bytearray()
        self._details: list[str] = []
        self._sums = bytearray()
        self._said: dict[str, str] = {}  # most details are those of many

    def add(self, item: TensorComparison) -> None:
        """Add the next one."""
        self._names.append(item.name)
        self._statuses.append(_STATUSES.index(item.status))
        self._details.append(self._said.setdefault(item.detail, item.detail))
        stats = item.stats
        self._sums += _NO_SUMS if stats is None else _SUMS.pack(*_sums(stats))

    def item(self, place: int) -> TensorComparison:
        """Make one again."""
        sums = _SUMS.unpack_from(self._sums, place * _SUMS.size)
        stats = ErrorStats(*sums) if sums[0] >= 0 else None
        return TensorComparison(self._names[place], _STATUSES[self._statuses[place]], self._details[place], stats)

    def worst_first(self, ratios: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.intp]]:
        """Return the places of all in the order of ``Comparisons``, by their signal-to-noise ratios."""
        by_name = np.argsort(np.array(self._names, object), kind="stable")
        badness = _BADNESS[np.frombuffer(self._statuses, np.uint8)]
        return by_name[np.lexsort((ratios[by_name], badness[by_name]))]
