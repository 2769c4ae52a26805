"""Layouts of differences to a base tensor, in ``.wdelta`` files and sparse patches (``spec/delta_*.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, LayoutSource

RAW = "raw"
GAPS = "gap_delta"
INDEX_TYPES: Mapping[str, tuple[str, ...]] = {RAW: ("i32", "i64"), GAPS: ("u16", "u32")}
"""Encodings of positions in a patch (absolute, or gaps between positions), and the element types of each."""


@dataclass(frozen=True, slots=True)
class SparseDeltaLayout:
    """Positions and values of differences. ``sparsity`` is the fraction of omitted elements, if the file states it."""

    sparsity: float | None = None
    codec: ClassVar[str] = "delta_sparse"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {} if self.sparsity is None else {"sparsity": self.sparsity}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> SparseDeltaLayout:
        """Return the layout from a tensor's attributes. Raises ``CodecError`` ``delta_sparse.params``."""
        return cls(_share(tensor, "sparsity", "delta_sparse.params"))


@dataclass(frozen=True, slots=True)
class SignDeltaLayout:
    """A sign for each element and a scale for each row."""

    codec: ClassVar[str] = "delta_sign"

    def attributes(self) -> dict[str, Any]:
        """Return no attributes: the parts determine the layout."""
        return {}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> SignDeltaLayout:
        return cls()


@dataclass(frozen=True, slots=True)
class Int4DeltaLayout:
    """Four-bit codes with one scale and one zero point, and separate outliers.

    Parameters
    ----------
    layout : {1, 2}
        1: outliers have no code. 2: every element has a code.
    outlier_fraction : float or None
        The fraction of outliers, if the file states it.
    """

    layout: int
    outlier_fraction: float | None = None
    codec: ClassVar[str] = "delta_int4"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        fraction = {} if self.outlier_fraction is None else {"outlier_fraction": self.outlier_fraction}
        return {**fraction, "layout": self.layout}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> Int4DeltaLayout:
        """Return the layout from a tensor's attributes.

        Raises ``CodecError`` ``delta_int4.layout`` or ``delta_int4.params``.
        """
        reader = Attributes(tensor.params, "delta_int4.layout", tensor.name)
        return cls(reader.integer("layout", 1, 2), _share(tensor, "outlier_fraction", "delta_int4.params"))


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Positions in the base's tensor, and the values to put there.

    Parameters
    ----------
    encoding : str
        A key of ``INDEX_TYPES``.
    flat : bool
        Whether the shape is one-dimensional because the patch does not state the shape of the base.
    """

    encoding: str
    flat: bool
    codec: ClassVar[str] = "sparse_patch"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {"encoding": self.encoding, "flat": self.flat}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> PatchLayout:
        """Return the layout from a tensor's attributes. Raises ``CodecError`` ``sparse_patch.params``."""
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


def _share(tensor: LayoutSource, key: str, rule: str) -> float | None:
    value = tensor.params.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise Attributes(tensor.params, rule, tensor.name).refuse(f"a number for {key}", value)
    return value
