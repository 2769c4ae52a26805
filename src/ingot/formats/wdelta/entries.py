"""The header's entry for a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import msgspec

from ingot.core.numeric.dtypes import dtype
from ingot.core.parsing.strictjson import preload
from ingot.formats.wdelta.layout import STRATEGIES
from ingot.model.delta import Change

_Natural = Annotated[int, msgspec.Meta(ge=0)]


@preload
class Entry(msgspec.Struct):
    """A tensor's entry in the header, with the fields of all strategies."""

    strategy: str
    shape: tuple[_Natural, ...]
    dtype: str
    base_dtype: str | None = None
    sparsity: int | float | None = None
    outlier_fraction: int | float | None = None
    n_elements: _Natural | None = None
    n_cols: _Natural | None = None
    n_outliers: _Natural | None = None
    int4_layout: int | None = None
    indices: Any = None
    values: Any = None
    scales: Any = None
    packed_signs: Any = None
    outlier_idx: Any = None
    outlier_vals: Any = None
    scale: Any = None
    zero_point: Any = None
    packed: Any = None

    @property
    def codec(self) -> str:
        """The id of the codec that decodes the entry's strategy."""
        return STRATEGIES[self.strategy].codec

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def layout(self) -> int:
        """The layout of ``packed``: 1 if it has no codes for the outliers, 2 if it has."""
        return self.int4_layout or 1

    @property
    def change(self) -> Change:
        """The change of the tensor.

        If the entry has no ``base_dtype``, the result has the type ``dtype``, as in deltatensors 0.2.0.
        """
        return Change("apply", dtype(self.base_dtype or self.dtype).name)

    def record_of(self, field: str) -> str:
        """Return the name of the record that contains the array of ``field``: its ``_ref``, else the field's name."""
        value = getattr(self, field)
        name = value.get("_ref") if isinstance(value, dict) else None
        return name if isinstance(name, str) else field

    def params(self) -> dict[str, Any]:
        """Return the tensor's parameters for its codec."""
        if self.strategy == "sparse":
            return {} if self.sparsity is None else {"sparsity": self.sparsity}
        if self.strategy == "quantized":
            return {}
        fraction = {} if self.outlier_fraction is None else {"outlier_fraction": self.outlier_fraction}
        return {**fraction, "layout": self.layout}

    def counts(self) -> dict[str, int | None]:
        """Return the number of elements of each array, by field; None if the header does not determine the number."""
        if self.strategy == "sparse":
            return {"indices": None, "values": None}
        if self.strategy == "quantized":
            return {"scales": scale_rows(self.shape), "packed_signs": -(-self.size // 8)}
        outliers = self.n_outliers or 0
        codes = self.size - (outliers if self.layout == 1 else 0)
        return {
            "outlier_idx": outliers,
            "outlier_vals": outliers,
            "scale": 1,
            "zero_point": 1,
            "packed": -(-codes // 2),
        }


def scale_rows(shape: Sequence[int]) -> int:
    """Return the number of scales of a tensor of strategy ``quantized``: one per row, its first dimension."""
    return shape[0] if len(shape) > 1 else 1


def cols(shape: Sequence[int]) -> int:
    """Return the header's ``n_cols`` for a tensor of ``shape``: the elements of a row of the first dimension."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)
