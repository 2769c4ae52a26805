"""Layouts of values as they are, and of codecs that add nothing but where the values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts.base import Attributes, Described, Shape, element_count
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "tca_tbe.params"
DTYPE = "bf16"


@dataclass(frozen=True, slots=True)
class TcaLayout:
    """bf16 in bit planes: three bits for one of seven neighbouring exponents, and the rest as it is.

    ``start`` is the exponent before the first of the seven; None until a fit pass has chosen it.
    """

    start: int | None
    codec: ClassVar[str] = "tca_tbe"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        start = {} if self.start is None else {"start": self.start}
        return {"codec_version": VERSION, **start, "dtype": DTYPE}

    @classmethod
    def of(cls, tensor: Described) -> TcaLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``tca_tbe.params``."""
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        reader.choice("dtype", (DTYPE,))
        return cls(reader.integer("start", -(2**31), 2**31 - 1) if reader.has("start") else None)


DATA = "data"


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Values one after the other, row-major.

    Parameters
    ----------
    dtype : str
        Logical element type.
    holder : str or None
        A wider type that the values are stored in, for containers that have no name for their own; None where they are
        stored as they are.
    """

    dtype: str
    holder: str | None = None
    codec: ClassVar[str] = "dense"

    def attributes(self) -> dict[str, Any]:
        """Return no attributes: the part's types tell everything."""
        return {}

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the one part of a tensor of ``shape``; KeyError for an unknown element type."""
        row = DTYPES[self.dtype]
        count = element_count(shape)
        if self.holder is not None:
            return (PartSpec(DATA, self.holder, DTYPES[self.holder].nbytes(count), self.dtype),)
        return (PartSpec(DATA, row.storage, row.nbytes(count), None if row.is_storage else row.name),)

    @classmethod
    def of(cls, tensor: Described) -> DenseLayout:
        """Read what a tensor's element types say."""
        row = DTYPES.get(tensor.dtype)
        stored = tensor.part_dtypes.get(DATA)
        return cls(tensor.dtype, stored if row is not None and stored not in (None, row.storage) else None)
