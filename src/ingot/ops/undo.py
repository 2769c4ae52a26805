"""Undoing a delta in memory, bit for bit: what of the base the changed values do not tell, kept small.

An additive delta rounds, so subtracting it again gives the base back only nearly; an exact one needs the base to be
read. For every slab a ``delta_exact`` tensor in memory holds the difference between the base and what can be had
without it (the result, or the result less the difference): mostly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ingot.codecs.base import RowReader
from ingot.codecs.delta import delta_codec, widened
from ingot.codecs.table import CODECS
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.floats import cast_into
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor

_EXACT = "delta_exact"


def difference_between(start: Array, wanted: Array) -> Tensor:
    """Return a ``delta_exact`` tensor in memory that turns ``start`` into ``wanted`` (both [rows, cols])."""
    dtype = resolve_dtype(start.dtype).name
    encoder = delta_codec(_EXACT).encoder(start.shape, dtype, {})
    parts = encoder.encode(start, wanted)
    specs = {spec.role: spec for spec in encoder.parts}
    stored = {role: memory_part(np.array(data), specs[role].dtype, specs[role].type) for role, data in parts.items()}
    return Tensor("", start.shape, dtype, _EXACT, stored, dict(encoder.params))


def put_back(log: Tensor, start: Array, out: Array) -> None:
    """Apply what ``difference_between`` gave."""
    applier = delta_codec(_EXACT).applier(log, log.dtype)
    applier.apply(start, out)
    applier.finish()


@dataclass(slots=True)
class TensorUndo:
    """How one tensor, changed in place by ``delta``, gets its values back.

    ``logs`` hold one entry per slab of ``step`` rows that was changed; ``matrix`` is how the tensor is cut.
    """

    delta: Tensor
    matrix: tuple[int, int]
    step: int
    logs: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that the logs take."""
        return sum(log.nbytes for log in self.logs)

    def change(self, rows: Array, reader: RowReader) -> None:
        """Add the next differences to ``rows`` in place, and log what subtracting them will not give back."""
        added = np.empty(rows.shape, np.float32)
        reader.read_into(added)
        result, back = np.empty_like(rows), np.empty_like(rows)
        total = widened(rows) + added
        cast_into(total, result)
        _less(result, added, back)
        self.logs.append(difference_between(back, rows))
        rows[...] = result

    def replace(self, rows: Array, result: Array) -> None:
        """Put ``result`` in the place of ``rows``, and log the way back."""
        self.logs.append(difference_between(result, rows))
        rows[...] = result

    def revert(self, values: Array) -> None:
        """Put the base's values back into ``values``, an array of the tensor's shape, as far as slabs were changed."""
        matrix = values.reshape(self.matrix)
        reader = None if delta_codec(self.delta.codec).exact else CODECS[self.delta.codec].reader(self.delta)
        for number, log in enumerate(self.logs):
            rows = matrix[number * self.step : (number + 1) * self.step]
            start = rows
            if reader is not None:
                added, start = np.empty(rows.shape, np.float32), np.empty_like(rows)
                reader.read_into(added)
                _less(rows, added, start)
            put_back(log, start, rows)
        self.logs.clear()


def _less(result: Array, added: Array, out: Array) -> None:
    """Round ``result - added``, computed in float32, to ``out``."""
    total = widened(result) - added
    cast_into(total, out)
