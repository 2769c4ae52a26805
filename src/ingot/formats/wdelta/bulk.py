"""Where tensors of strategy ``sparse`` lie, most of a delta's: what reads them together (``Many.bulk``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ingot.core.columns import Array, numbers
from ingot.formats.wdelta.entries import EntryColumns
from ingot.formats.wdelta.layout import STRATEGIES
from ingot.model.bulk import Bulk, Places, number_kinds
from ingot.model.bytesource import ByteSource
from ingot.model.ranges import is_distant

SPARSE_FIELDS = tuple(STRATEGIES["sparse"].fields)
_NAMES = tuple(STRATEGIES)
_LONGEST = 32  # digits of a number that many entries state


def sparse_bulk(source: ByteSource, entries: EntryColumns, places: Mapping[str, Places]) -> Bulk | None:
    """Return where these tensors lie, whose entries and records break no rule; None without any.

    ``places`` has by entry where each of ``SPARSE_FIELDS`` lies, and anything for entries of other strategies.
    """
    sparsity, count = _sparsities(entries)
    meant = (entries.kinds == _NAMES.index("sparse")) & (sparsity >= 0)
    if is_distant(source) or not meant.any():
        return None
    # Who differs in the number of positions, or in what is said of it, is of another kind.
    alike = places["values"].lengths * (count + 1) + sparsity
    differ, types = np.unique(np.where(meant, alike, 0), return_inverse=True)
    sizes, starts = numbers(entries.shape.first), numbers(entries.shape.second)
    found, kinds = number_kinds(types, ["f32"] * differ.size, sizes, starts, meant)
    parts = {name: places[name] for name in SPARSE_FIELDS}
    return Bulk(STRATEGIES["sparse"].codec, source, entries.rows, found, kinds, parts, None, verify=True)


def _sparsities(entries: EntryColumns) -> tuple[Array, int]:
    """Return by entry which of so many texts its sparsity is, their number for none; -1 for one that is too long."""
    column, memory = entries.decimals[0], np.frombuffer(entries.data, np.uint8)
    starts, lengths = numbers(column.first), numbers(column.second)
    found, known = np.full(starts.size, -1, np.int64), 0
    for length in np.unique(lengths[starts >= 0]).tolist():
        if 0 < length <= _LONGEST:
            own = np.flatnonzero((starts >= 0) & (lengths == length))
            texts = memory[starts[own, None] + np.arange(length)].view(f"S{length}").reshape(-1)
            differ, which = np.unique(texts, return_inverse=True)
            found[own] = known + which
            known += differ.size
    found[starts < 0] = known
    return found, known
