"""Layouts of floats that are stored without loss in fewer bits; attributes as in ``spec/tca_tbe.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.model.layouts.base import Attributes, Described

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
