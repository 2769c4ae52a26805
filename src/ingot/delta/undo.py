"""Undoing a delta in memory, bit for bit: what of the base the changed values do not tell, kept small.

An additive delta rounds, so subtracting it again gives the base back only nearly; an exact one needs the base to be
read. For every chunk a log holds the difference between the base and what can be had without it (the result, or the
result less the difference): mostly nothing.
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
from ingot.delta.word_changes import few_changes
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor

_EXACT = DELTA_EXACT
# Up to one changed element in so many, gaps and steps are made faster than they are coded.
_FEW = 8


class Log(Protocol):
    """What turns one array into another."""

    @property
    def nbytes(self) -> int: ...

    def put_back(self, start: Array, out: Array) -> None:
        """Write the other array into ``out``, which may be ``start`` itself."""
        ...


@dataclass(frozen=True, slots=True)
class SparseLog:
    """The few elements whose bits differ: gaps between their positions, and differences of their bits as integers."""

    gaps: Array
    steps: Array

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.steps.nbytes

    def put_back(self, start: Array, out: Array) -> None:
        if start is not out:
            out[...] = start
        words = _words(out)
        words[np.cumsum(self.gaps, dtype=np.int64) - 1] += self.steps.astype(f"i{words.itemsize}").view(words.dtype)


@dataclass(frozen=True, slots=True)
class ExactLog:
    """A ``delta_exact`` tensor in memory, where many elements differ."""

    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def put_back(self, start: Array, out: Array) -> None:
        applier = delta_codec(_EXACT).applier(self.tensor, self.tensor.dtype)
        applier.apply(start, out)
        applier.finish()


def difference_between(start: Array, wanted: Array) -> Log:
    """Return what turns ``start`` into ``wanted`` (of one type and shape, [rows, cols], C order)."""
    old = _words(start)
    new = _words(wanted)
    few = few_changes(old, new, old.size // _FEW)
    if few is None:
        return ExactLog(_exact(start, wanted))
    gaps, steps = few
    return SparseLog(_narrow(gaps, "u"), _narrow(steps.view(f"i{old.itemsize}"), "i"))


def _words(array: Array) -> Array:
    return array.reshape(-1).view(f"u{array.itemsize}")


def _narrow(values: Array, kind: str) -> Array:
    """Return integers in the smallest type of ``kind`` that holds them all."""
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for size in (1, 2, 4):
        limits = np.iinfo(f"{kind}{size}")
        if limits.min <= least and most <= limits.max:
            return values.astype(limits.dtype)
    return values


def _exact(start: Array, wanted: Array) -> Tensor:
    dtype = resolve_dtype(start.dtype).name
    encoder = delta_codec(_EXACT).encoder(start.shape, dtype, {})
    parts = encoder.encode(start, wanted)
    specs = {spec.role: spec for spec in encoder.parts}
    stored = {role: memory_part(np.array(data), specs[role].dtype, specs[role].type) for role, data in parts.items()}
    return Tensor("", start.shape, dtype, _EXACT, stored, dict(encoder.params))


@dataclass(slots=True)
class TensorUndo:
    """How one tensor, changed in place by ``delta``, gets its values back.

    ``logs`` hold one entry per chunk of ``step`` rows that was changed, ``sums`` the digest of what it was changed to;
    ``matrix`` is how the tensor, of ``shape``, is cut.
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
        """Bytes that the logs take."""
        return sum(log.nbytes for log in self.logs)

    def change(self, rows: Array, reader: RowReader) -> None:
        """Add the next differences to ``rows`` in place, and log what subtracting them will not give back."""
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
            _less(result, added, back)
        self._log(back, rows, result)

    def replace(self, rows: Array, result: Array) -> None:
        """Put ``result`` in the place of ``rows``, and log the way back."""
        self._log(result, rows, result)

    def holds(self, values: Array) -> bool:
        """Whether ``values`` are, bit for bit, what the delta left: as far as a CRC-32C of every chunk tells."""
        if values.shape != self.shape or values.dtype != self.dtype:
            return False
        matrix = values.reshape(self.matrix)
        chunks = (matrix[number * self.step : (number + 1) * self.step] for number in range(len(self.sums)))
        return all(_digest(rows) == known for rows, known in zip(chunks, self.sums, strict=True))

    def revert(self, values: Array) -> None:
        """Put the base's values back into ``values``, an array of the tensor's shape, as far as chunks were changed."""
        if not self.logs:  # of a tensor that was refused, not even a reader may be there
            return
        matrix = values.reshape(self.matrix)
        reader = None if delta_codec(self.delta.codec).exact else CODECS[self.delta.codec].reader(self.delta)
        for number, log in enumerate(self.logs):
            rows = matrix[number * self.step : (number + 1) * self.step]
            start = rows
            if reader is not None:
                start = scratch(rows.shape, rows.dtype)
                _subtract(reader, rows, start)
            log.put_back(start, rows)
        self.logs.clear()
        self.sums.clear()

    def _log(self, start: Array, rows: Array, result: Array) -> None:
        log = difference_between(start, rows)
        known = _digest(result)
        self.logs.append(log)
        self.sums.append(known)
        rows[...] = result


def _subtract(reader: RowReader, rows: Array, out: Array) -> None:
    """Write ``rows`` less the next differences into ``out``."""
    if isinstance(reader, BatchAddingReader) and fusible(rows, out):
        reader.subtract_from(rows, out)
        return
    added = scratch(rows.shape, np.float32)
    reader.read_into(added)
    _less(rows, added, out)


def _less(result: Array, added: Array, out: Array) -> None:
    """Round ``result - added``, computed in float32 in place of ``added``, to ``out``."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.subtract(as_f32(result), added, out=added)
    cast_into(total, out)


def _digest(rows: Array) -> str:
    return checksums.digest("crc32c", file_bytes(rows))
