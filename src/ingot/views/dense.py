"""Views that change or add small dense tensors: another element type or shape, or a constant added."""

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
from ingot.views.common import BuildTensor, require_names, view_of


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a tensor's values, its element type and its shape.

    ``plus`` is added in f32, then values are rounded once to ``dtype``. The result is reshaped to ``shape`` if it is
    set. Then ``zero_rows`` rows of zeros are inserted before the first row.
    """

    dtype: str
    plus: float = 0.0
    shape: tuple[int, ...] | None = None
    zero_rows: int = 0

    def values(self, tensor: Tensor) -> Array:
        """Return the values of ``tensor`` after this change of values, type and shape."""
        wide = tensor.numpy("f32")
        if self.plus:
            wide = wide + np.float32(self.plus)
        values: Array = cast(wide, self.dtype).reshape(tensor.shape if self.shape is None else self.shape)
        if self.zero_rows:
            values = np.concatenate([np.zeros((self.zero_rows, *values.shape[1:]), values.dtype), values])
        return values


def change(checkpoint: Checkpoint, changes: Mapping[str, Change]) -> Checkpoint:
    """Return the checkpoint with changed floating-point tensors; results are cached in memory.

    Raises
    ------
    UsageError
        ``tensor.unknown``, ``view.delta``; ``view.shape``: a shape with another number of elements.
    """
    require_names(checkpoint, changes)
    for name, planned in changes.items():
        if planned.shape is not None and prod(planned.shape) != checkpoint[name].size:
            raise UsageError(
                f"expected a shape of {checkpoint[name].size} elements, found {list(planned.shape)}",
                rule="view.shape",
                where=name,
            )

    def changed(name: str) -> BuildTensor:
        def make() -> Tensor:
            values = changes[name].values(checkpoint[name])
            row = DTYPES[changes[name].dtype]
            part = memory_part(values, row.storage, None if row.is_storage else row.name)
            codec = CODECS[DenseLayout.codec]
            original_codec = "" if checkpoint[name].codec == codec.id else checkpoint[name].codec
            return Tensor(name, values.shape, row.name, codec.id, {DATA: part}, {}, codec, decoded_from=original_codec)

        return make

    entries = [(name, changed(name) if name in changes else None, name) for name in checkpoint]
    description = {name: asdict(planned) for name, planned in changes.items()}
    return view_of(checkpoint, entries, change, dict(changes), description)


def add(checkpoint: Checkpoint, arrays: Mapping[str, Array]) -> Checkpoint:
    """Return the checkpoint with f32 arrays appended as dense tensors.

    Raises ``UsageError`` ``view.name``, ``view.delta``.
    """
    tensors = {name: np.asarray(values, np.float32, order="C") for name, values in arrays.items()}

    def added(name: str) -> BuildTensor:
        def make() -> Tensor:
            parts = {DATA: memory_part(tensors[name], "f32", None)}
            return Tensor(name, tensors[name].shape, "f32", DenseLayout.codec, parts, {}, CODECS[DenseLayout.codec])

        return make

    entries: list[tuple[str, BuildTensor | None, str]] = [(name, None, name) for name in checkpoint]
    entries += [(name, added(name), name) for name in tensors]
    description = {
        name: [list(values.shape), checksums.digest("sha256", values.reshape(-1).view(np.uint8).data)]
        for name, values in tensors.items()
    }
    return view_of(checkpoint, entries, add, dict(tensors), description, dict.fromkeys(tensors, ()))
