"""Layouts of differences to a tensor of the base, as ``.wdelta`` and sparse patches have them (``spec/delta_*.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, Described

RAW = "raw"
GAPS = "gap_delta"
INDEX_TYPES: Mapping[str, tuple[str, ...]] = {RAW: ("i32", "i64"), GAPS: ("u16", "u32")}
"""How a patch stores positions: themselves, or how many elements lie between two; and in which types."""


@dataclass(frozen=True, slots=True)
class SparseDeltaLayout:
    """Positions and values; ``sparsity`` is the share that was left out, where it is told."""

    sparsity: float | None = None
    codec: ClassVar[str] = "delta_sparse"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {} if self.sparsity is None else {"sparsity": self.sparsity}

    @classmethod
    def of(cls, tensor: Described) -> SparseDeltaLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``delta_sparse.params``."""
        return cls(_share(tensor, "sparsity", "delta_sparse.params"))


@dataclass(frozen=True, slots=True)
class SignDeltaLayout:
    """A sign per element and a scale per row."""

    codec: ClassVar[str] = "delta_sign"

    def attributes(self) -> dict[str, Any]:
        """Return no attributes: the parts tell everything."""
        return {}

    @classmethod
    def of(cls, tensor: Described) -> SignDeltaLayout:
        return cls()


@dataclass(frozen=True, slots=True)
class Int4DeltaLayout:
    """Four-bit codes with one scale and zero point, and outliers beside them.

    Parameters
    ----------
    layout : {1, 2}
        1: outliers have no code. 2: every element has one.
    outlier_fraction : float or None
        The share that was stored apart, where it is told.
    """

    layout: int
    outlier_fraction: float | None = None
    codec: ClassVar[str] = "delta_int4"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        fraction = {} if self.outlier_fraction is None else {"outlier_fraction": self.outlier_fraction}
        return {**fraction, "layout": self.layout}

    @classmethod
    def of(cls, tensor: Described) -> Int4DeltaLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``delta_int4.layout``, ``delta_int4.params``."""
        reader = Attributes(tensor.params, "delta_int4.layout", tensor.name)
        return cls(reader.integer("layout", 1, 2), _share(tensor, "outlier_fraction", "delta_int4.params"))


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Positions and the values that replace those of the base.

    Parameters
    ----------
    encoding : str
        A key of ``INDEX_TYPES``.
    flat : bool
        Whether the shape is that of the elements one after the other, because the patch does not tell the base's.
    """

    encoding: str
    flat: bool
    codec: ClassVar[str] = "sparse_patch"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {"encoding": self.encoding, "flat": self.flat}

    @classmethod
    def of(cls, tensor: Described) -> PatchLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``sparse_patch.params``."""
        encoding = tensor.params.get("encoding")
        is_flat = tensor.params.get("flat")
        if not isinstance(encoding, str) or encoding not in INDEX_TYPES or not isinstance(is_flat, bool):
            raise CodecError(
                "sparse_patch.params",
                f"expected encoding {' or '.join(INDEX_TYPES)} and flat true or false, found {str(encoding)[:40]!r} "
                f"and {str(is_flat)[:40]!r}",
                where=tensor.name,
            )
        return cls(encoding, is_flat)


def _share(tensor: Described, key: str, rule: str) -> float | None:
    value = tensor.params.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise Attributes(tensor.params, rule, tensor.name).refuse(f"a number for {key}", value)
    return value
