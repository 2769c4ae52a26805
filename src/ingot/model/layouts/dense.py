"""Layouts of unquantized values: dense arrays, and bf16 in bit planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts.base import Attributes, LayoutSource, Shape, element_count
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "tca_tbe.params"
DTYPE = "bf16"


@dataclass(frozen=True, slots=True)
class TcaLayout:
    """bf16 in bit planes: three bits select one of seven consecutive exponents, the other bits are stored unchanged.

    ``start`` is the exponent below the seven; None until a fit pass chooses it.
    """

    start: int | None
    codec: ClassVar[str] = "tca_tbe"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        start = {} if self.start is None else {"start": self.start}
        return {"codec_version": VERSION, **start, "dtype": DTYPE}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> TcaLayout:
        """Return the layout from a tensor's attributes. Raises ``CodecError`` ``tca_tbe.params``."""
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        reader.choice("dtype", (DTYPE,))
        return cls(reader.integer("start", -(2**31), 2**31 - 1) if reader.has("start") else None)


DATA = "data"


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Consecutive values in row-major order.

    Parameters
    ----------
    dtype : str
        Logical element type.
    holder : str or None
        A wider type in which the values are stored, for containers that do not support ``dtype``; None if they are
        stored in ``dtype``.
    """

    dtype: str
    holder: str | None = None
    codec: ClassVar[str] = "dense"

    def attributes(self) -> dict[str, Any]:
        """Return no attributes: the types of the part determine the layout."""
        return {}

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the only part of a tensor of ``shape``. Raises ``KeyError`` for an unsupported element type."""
        row = DTYPES[self.dtype]
        count = element_count(shape)
        if self.holder is not None:
            return (PartSpec(DATA, self.holder, DTYPES[self.holder].nbytes(count), self.dtype),)
        return (PartSpec(DATA, row.storage, row.nbytes(count), None if row.is_storage else row.name),)

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> DenseLayout:
        """Return the layout from a tensor's element types."""
        row = DTYPES.get(tensor.dtype)
        stored = tensor.part_dtypes.get(DATA)
        return cls(tensor.dtype, stored if row is not None and stored not in (None, row.storage) else None)
