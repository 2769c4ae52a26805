"""Undo a delta in memory, bit for bit, with small logs.

Subtracting an additive delta restores the base only approximately, because values were rounded; an exact delta can only
be reverted from a log. For every chunk, a log contains the difference between the base and an estimate of it that needs
no log. The estimate is the result, or the result minus the delta. This difference is mostly zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ingot.codecs.base import RowReader
from ingot.codecs.delta.base import as_f32, delta_codec, fusible
from ingot.codecs.delta.flat import BatchAddingReader
from ingot.codecs.table import CODECS, DELTA_EXACT
from ingot.core.bytes import checksums
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import cast_into, file_bytes
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime import native
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor

_EXACT = DELTA_EXACT
# A sparse log is used if at most one of this number of elements changed, because it is faster to compute
_SPARSE_FACTOR = 8


class Log(Protocol):
    """A record of the change from a start array to a similar end array."""

    @property
    def nbytes(self) -> int: ...

    def put_back(self, start: Array, out: Array) -> None:
        """Write the end array to ``out``, given the start array.

        ``out`` may be ``start``.
        """
        ...


@dataclass(frozen=True, slots=True)
class SparseLog:
    """A log of few changed elements: gaps between their positions, and differences of their bits as integers."""

    gaps: Array
    steps: Array

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.steps.nbytes

    def put_back(self, start: Array, out: Array) -> None:
        if start is not out:
            out[...] = start
        bits = _as_unsigned(out)
        bits[np.cumsum(self.gaps, dtype=np.int64) - 1] += self.steps.astype(f"i{bits.itemsize}").view(bits.dtype)


@dataclass(frozen=True, slots=True)
class ExactLog:
    """A log of many changed elements: a ``delta_exact`` tensor in memory."""

    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def put_back(self, start: Array, out: Array) -> None:
        applier = delta_codec(_EXACT).applier(self.tensor, self.tensor.dtype)
        applier.apply(start, out)
        applier.finish()


def difference_between(start: Array, end: Array) -> Log:
    """Return the log from ``start`` to ``end``, two arrays [rows, cols] of one type in C order."""
    old = _as_unsigned(start)
    new = _as_unsigned(end)
    changes = few_changes(old, new, old.size // _SPARSE_FACTOR)
    if changes is None:
        return ExactLog(_exact(start, end))
    gaps, steps = changes
    return SparseLog(_narrow(gaps, "u"), _narrow(steps.view(f"i{old.itemsize}"), "i"))


def few_changes(old: Array, new: Array, limit: int) -> tuple[Array, Array] | None:
    """Return the positions at which ``new`` differs from ``old``, and the differences, if there are at most ``limit``.

    Parameters
    ----------
    old, new : array
        Vectors of one unsigned integer type in C order; floats are given as their bits.
    limit : int
        The maximum number of differences.

    Returns
    -------
    tuple of int64 and of the arrays' type, or None
        The distance of each position from the position before it, and the differences ``new - old`` modulo the type's
        range. The distance of the first position is counted from -1. None if there are more than ``limit`` differences.
    """
    gaps = np.empty(limit, np.int64)
    steps = np.empty(limit, old.dtype)
    count = native.kernels.changed_words(old, new, gaps, steps)
    return None if count > limit else (gaps[:count], steps[:count])


def _as_unsigned(array: Array) -> Array:
    return array.reshape(-1).view(f"u{array.itemsize}")


def _narrow(values: Array, letter: str) -> Array:
    """Return integers in the smallest type of 1 to 8 bytes that represents them; ``letter`` is ``i`` or ``u``."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for size in (1, 2, 4):
        limits = np.iinfo(f"{letter}{size}")
        if limits.min <= low and high <= limits.max:
            return values.astype(limits.dtype)
    return values


def _exact(start: Array, end: Array) -> Tensor:
    dtype = resolve_dtype(start.dtype).name
    encoder = delta_codec(_EXACT).encoder(start.shape, dtype, {})
    parts = encoder.encode(start, end)
    specs = {spec.role: spec for spec in encoder.parts}
    stored = {role: memory_part(np.array(data), specs[role].dtype, specs[role].type) for role, data in parts.items()}
    return Tensor("", start.shape, dtype, _EXACT, stored, dict(encoder.params))


@dataclass(slots=True)
class TensorUndo:
    """The undo data of a tensor that ``delta`` changed in place.

    ``logs`` and ``sums`` have an entry for each changed chunk of ``step`` rows: its log, and the digest of its new
    values. The tensor with ``shape`` is processed as ``matrix`` (rows, cols).
    """

    delta: Tensor
    shape: tuple[int, ...]
    matrix: tuple[int, int]
    step: int
    dtype: np.dtype[Any]
    logs: list[Log] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor's logs."""
        return sum(log.nbytes for log in self.logs)

    def change(self, rows: Array, reader: RowReader) -> None:
        """Add the next differences of ``reader`` to ``rows`` in place, and log what subtracting them cannot restore."""
        result = scratch(rows.shape, rows.dtype)
        back = scratch(rows.shape, rows.dtype)
        if isinstance(reader, BatchAddingReader) and fusible(rows, result):
            reader.add_back_into(rows, result, back)
        else:
            added = scratch(rows.shape, np.float32)
            total = scratch(rows.shape, np.float32)
            reader.read_into(added)
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(as_f32(rows), added, out=total)
            cast_into(total, result)
            _subtract_into(result, added, back)
        self._log(back, rows, result)

    def replace(self, rows: Array, result: Array) -> None:
        """Replace ``rows`` by ``result``, and log the difference."""
        self._log(result, rows, result)

    def matches(self, values: Array) -> bool:
        """Return whether ``values`` are unchanged since the delta was applied, by the CRC-32C of each chunk."""
        if values.shape != self.shape or values.dtype != self.dtype:
            return False
        matrix = values.reshape(self.matrix)
        chunks = (matrix[index * self.step : (index + 1) * self.step] for index in range(len(self.sums)))
        return all(_digest(rows) == digest for rows, digest in zip(chunks, self.sums, strict=True))

    def revert(self, values: Array) -> None:
        """Restore the base's values of all changed chunks in ``values``, an array with the tensor's shape."""
        if not self.logs:  # a refused tensor may have no reader
            return
        matrix = values.reshape(self.matrix)
        reader = None if delta_codec(self.delta.codec).exact else CODECS[self.delta.codec].reader(self.delta)
        for index, log in enumerate(self.logs):
            rows = matrix[index * self.step : (index + 1) * self.step]
            start = rows
            if reader is not None:
                start = scratch(rows.shape, rows.dtype)
                _subtract(reader, rows, start)
            log.put_back(start, rows)
        self.logs.clear()
        self.sums.clear()

    def _log(self, start: Array, rows: Array, result: Array) -> None:
        log = difference_between(start, rows)
        digest = _digest(result)
        self.logs.append(log)
        self.sums.append(digest)
        rows[...] = result


def _subtract(reader: RowReader, rows: Array, out: Array) -> None:
    """Write ``rows`` minus the next differences of ``reader`` to ``out``, rounded once."""
    if isinstance(reader, BatchAddingReader) and fusible(rows, out):
        reader.subtract_from(rows, out)
        return
    added = scratch(rows.shape, np.float32)
    reader.read_into(added)
    _subtract_into(rows, added, out)


def _subtract_into(result: Array, added: Array, out: Array) -> None:
    """Round ``result - added``, computed in f32 in the memory of ``added``, to ``out``."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.subtract(as_f32(result), added, out=added)
    cast_into(total, out)


def _digest(rows: Array) -> str:
    return checksums.digest("crc32c", file_bytes(rows))
