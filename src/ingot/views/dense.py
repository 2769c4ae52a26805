"""Views of small dense tensors: with other values (another element type, a constant added, a shape), and added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import DTYPES, cast
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.views.common import Make, require_known, view_of


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a tensor's values: ``plus`` is added in f32, then they are rounded to ``dtype`` once.

    ``above`` are rows of zeros that are put before the others.
    """

    dtype: str
    plus: float = 0.0
    shape: tuple[int, ...] | None = None
    above: int = 0

    def values(self, tensor: Tensor) -> Array:
        """Return the values, of the wanted shape."""
        wide = tensor.numpy("f32")
        if self.plus:
            wide = wide + np.float32(self.plus)
        values: Array = cast(wide, self.dtype).reshape(tensor.shape if self.shape is None else self.shape)
        if self.above:
            values = np.concatenate([np.zeros((self.above, *values.shape[1:]), values.dtype), values])
        return values


def change(checkpoint: Checkpoint, changes: Mapping[str, Change]) -> Checkpoint:
    """Return the checkpoint with other values of some floating-point tensors, which are held in memory once asked for.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.delta``; ``view.shape``: another number of elements.
    """
    require_known(checkpoint, changes)
    for name, wanted in changes.items():
        if wanted.shape is not None and prod(wanted.shape) != checkpoint[name].size:
            raise UsageError(
                f"expected a shape of {checkpoint[name].size} elements, found {list(wanted.shape)}",
                rule="view.shape",
                where=name,
            )

    def changed(name: str) -> Make:
        def make() -> Tensor:
            values = changes[name].values(checkpoint[name])
            row = DTYPES[changes[name].dtype]
            part = memory_part(values, row.storage, None if row.is_storage else row.name)
            codec = CODECS[DenseLayout.codec]
            told = "" if checkpoint[name].codec == codec.id else checkpoint[name].codec
            return Tensor(name, values.shape, row.name, codec.id, {DATA: part}, {}, codec, decoded_from=told)

        return make

    entries = [(name, changed(name) if name in changes else None, name) for name in checkpoint]
    said = {name: asdict(wanted) for name, wanted in changes.items()}
    return view_of(checkpoint, entries, change, dict(changes), said)


def add(checkpoint: Checkpoint, arrays: Mapping[str, Array]) -> Checkpoint:
    """Return the checkpoint with further dense tensors behind its own, from arrays in f32.

    Raises ``UsageError`` ``view.name``, ``view.delta``.
    """
    held = {name: np.ascontiguousarray(values, np.float32) for name, values in arrays.items()}

    def added(name: str) -> Make:
        def make() -> Tensor:
            parts = {DATA: memory_part(held[name], "f32", None)}
            return Tensor(name, held[name].shape, "f32", DenseLayout.codec, parts, {}, CODECS[DenseLayout.codec])

        return make

    entries: list[tuple[str, Make | None, str]] = [(name, None, name) for name in checkpoint]
    entries += [(name, added(name), name) for name in held]
    said = {
        name: [list(values.shape), checksums.digest("sha256", values.reshape(-1).view(np.uint8).data)]
        for name, values in held.items()
    }
    return view_of(checkpoint, entries, add, dict(held), said, dict.fromkeys(held, ()))
