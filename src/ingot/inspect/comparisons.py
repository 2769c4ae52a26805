"""The results of a comparison by tensor, stored as columns to save memory for checkpoints with very many tensors."""

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
_SORT_CLASSES = np.array([0, 0, 0, 0, 1, 2, 2], np.uint8)  # by status; the lowest class comes first

# The fields of ErrorStats in order, as doubles and 64-bit integers, which represent them exactly.
_SUMS = Struct("=q5d2q")
_sums = attrgetter(*ErrorStats.__slots__)
_NO_SUMS = _SUMS.pack(-1, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """The result for one tensor name.

    ``status`` is ``identical`` (same dtype and bits), ``equal`` (same values in another dtype), ``differs``, ``only in
    A``, ``only in B``, ``shape differs`` or ``cannot decode``. ``stats`` is None if the values could not be compared as
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
    """A sequence of comparisons, worst first; items are built on each access and not cached.

    Tensors that are missing, have different shapes or cannot be decoded come first. Then come tensors that differ, and
    then equal tensors. Within each class, the order is by rising signal-to-noise ratio, then by name. A missing ratio
    counts as 0. If sums of squares overflowed, the ratio is NaN, and the tensor is the last of its class.
    """

    __slots__ = ("_columns", "_order")

    def __init__(self, comparisons: Iterable[TensorComparison]) -> None:
        self._columns = _Columns()
        ratios = array("d")
        for item in comparisons:
            self._columns.add(item)
            ratios.append(item.stats.snr_db if item.stats else 0.0)
        self._order = self._columns.worst_first(np.frombuffer(ratios))

    def __len__(self) -> int:
        return len(self._order)

    def _make(self, index: int) -> TensorComparison:
        return self._columns.item(int(self._order[index]))


class _Columns:
    """Comparisons in the order in which they were added, one column per field to save memory."""

    __slots__ = ("_details", "_names", "_statuses", "_sums", "_unique_details")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._statuses = bytearray()
        self._details: list[str] = []
        self._sums = bytearray()
        self._unique_details: dict[str, str] = {}  # many tensors have the same detail

    def add(self, item: TensorComparison) -> None:
        """Append the comparison ``item``."""
        self._names.append(item.name)
        self._statuses.append(_STATUSES.index(item.status))
        self._details.append(self._unique_details.setdefault(item.detail, item.detail))
        stats = item.stats
        self._sums += _NO_SUMS if stats is None else _SUMS.pack(*_sums(stats))

    def item(self, index: int) -> TensorComparison:
        """Return the comparison with the given index; indices count the calls of ``add``."""
        sums = _SUMS.unpack_from(self._sums, index * _SUMS.size)
        stats = ErrorStats(*sums) if sums[0] >= 0 else None
        return TensorComparison(self._names[index], _STATUSES[self._statuses[index]], self._details[index], stats)

    def worst_first(self, ratios: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.intp]]:
        """Return all indices in the order of ``Comparisons``; ``ratios`` are the signal-to-noise ratios by index."""
        by_name = np.argsort(np.array(self._names, object), kind="stable")
        classes = _SORT_CLASSES[np.frombuffer(self._statuses, np.uint8)]
        return by_name[np.lexsort((ratios[by_name], classes[by_name]))]
