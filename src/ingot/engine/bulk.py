"""Reading many small tensors together: few read calls, digests in one native call, no object for a tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ingot.codecs.base import ProvesMany
from ingot.codecs.table import CODECS
from ingot.core.buffers import take_each
from ingot.core.checksums import prove_each
from ingot.core.dtypes import numpy_dtype
from ingot.core.parallel import go_on
from ingot.errors import IngotError
from ingot.model.bulk import Bulk, Numbers, Places, Shape
from ingot.model.layouts.dense import DenseLayout
from ingot.model.ranges import read_each
from ingot.model.tensor import Array

EACH = 1 << 14
"""Bytes of a tensor that is read with others."""
# So many tensors, and bytes of theirs, are read together.
_COUNT, _BYTES = 512, 1 << 19
# Bytes between two parts that are read rather than left out: a call takes as long.
_GAP = 1 << 11


def groups(bulk: Bulk | None, names: Iterable[str]) -> Iterator[str | list[str]]:
    """Yield, in order, names of tensors to be read by themselves, and lists of names of some that are read together."""
    if bulk is None or sys.byteorder != "little":
        yield from names
        return
    rows, numbers, sizes = bulk.rows, bulk.numbers.data, bulk.nbytes.data
    group: list[str] = []
    total = 0
    for name in names:
        row = rows[name]
        size = sizes[row]
        alone = numbers[row] < 0 or not 0 < size <= EACH
        if group and (alone or total + size > _BYTES or len(group) == _COUNT):
            yield group
            group, total = [], 0
        if alone:
            yield name
        else:
            group.append(name)
            total += size
    if group:
        yield group


def load(bulk: Bulk, names: Sequence[str]) -> list[Array | None]:
    """Return dense tensors in arrays of their own, digests proven; None for one that has to be looked at by itself.

    Raises ``Stopped`` alone: what goes wrong is told when the tensor is read by itself.
    """
    rows = bulk.rows_of(names)
    found: list[Array | None] = [None] * len(names)
    try:
        data, (starts,) = _read(bulk, rows)
        proven = _proven(bulk, rows, data, starts).tolist()
        numbers = bulk.numbers[rows].tolist()
        forms = {number: (shape, numpy_dtype(dtype)) for number, dtype, shape in _kinds(bulk, numbers)}
        arrays = [np.empty(*forms[number]) for number in numbers]
        take_each(data, starts, arrays)
    except (IngotError, MemoryError):
        return found
    return [array if good else None for array, good in zip(arrays, proven, strict=True)]


def whole(bulk: Bulk, names: Sequence[str]) -> list[bool]:
    """Tell of tensors whether digests and all that their codec asks of their bytes were proven; the others have to be
    looked at by themselves."""
    rows = bulk.rows_of(names)
    try:
        data, starts = _read(bulk, rows)
        good = _proven(bulk, rows, data, starts[0])
        if bulk.codec != DenseLayout.codec:  # any bytes of which are values
            codec = CODECS[bulk.codec]
            if not isinstance(codec, ProvesMany):
                return [False] * len(names)
            numbers = bulk.numbers[rows].tolist()
            sizes = {number: prod(shape) for number, _, shape in _kinds(bulk, numbers)}
            parts = zip(bulk.parts.items(), starts, strict=True)
            places = {role: Places(at, place.lengths[rows]) for (role, place), at in parts}
            good &= codec.proves(data, places, np.array([sizes[number] for number in numbers], np.int64))
    except (IngotError, MemoryError):
        return [False] * len(names)
    found: list[bool] = good.tolist()
    return found


def _kinds(bulk: Bulk, numbers: Iterable[int]) -> Iterator[tuple[int, str, Shape]]:
    """Yield the kinds that have these numbers: a file may have as many as tensors."""
    return ((number, *bulk.kinds[number]) for number in set(numbers))


def _read(bulk: Bulk, rows: Numbers) -> tuple[Array, list[Numbers]]:
    """Read all parts of tensors; return the bytes, and of each part where it begins in them by tensor."""
    places = [*bulk.parts.values()]
    begins = np.concatenate([each.offsets[rows] for each in places])
    ends = begins + np.concatenate([each.lengths[rows] for each in places])
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(begins[1:] > reach[:-1] + _GAP) + 1  # where another call begins
    first, last = begins[np.append(0, apart)], reach[np.append(apart, begins.size) - 1]
    behind = np.cumsum(last - first)
    data = np.empty(int(behind[-1]), np.uint8)
    memory, stops = data.data, behind.tolist()
    spans = zip(first.tolist(), [0, *stops], stops, strict=False)
    go_on()
    read_each(bulk.source, [(start, memory[at:stop]) for start, at, stop in spans])
    shift = np.repeat(behind - last, np.diff(np.concatenate([[0], apart, [begins.size]])))
    found = np.empty(begins.size, np.int64)
    found[order] = begins + shift
    return data, np.split(found, len(places))


def _proven(bulk: Bulk, rows: Numbers, data: Array, starts: Numbers) -> NDArray[np.bool_]:
    """Tell of tensors in one part whether each has its digest, or none."""
    stated = bulk.digests
    if stated is None or not bulk.verify:
        return np.ones(rows.size, bool)
    (places,) = bulk.parts.values()
    return prove_each((data, starts, places.lengths[rows]), stated.data, stated.begins[rows], stated.lengths[rows])
