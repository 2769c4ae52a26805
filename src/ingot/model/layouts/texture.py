"""Layouts of weights as texture blocks; attributes as in ``spec/astc.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import FLOATS
from ingot.model.layouts.base import Attributes, Described

VERSION = 1
RULE = "astc.params"
PROFILE = "ldr"


@dataclass(frozen=True, slots=True)
class AstcLayout:
    """ASTC blocks of one luminance channel, then one scale and one offset for the tensor.

    Parameters
    ----------
    footprint : str
        Texels of a block, such as ``6x6``.
    dtype : str
        Logical element type.
    """

    footprint: str
    dtype: str
    codec: ClassVar[str] = "astc"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {"codec_version": VERSION, "footprint": self.footprint, "profile": PROFILE, "dtype": self.dtype}

    @classmethod
    def of(cls, tensor: Described) -> AstcLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``astc.params``."""
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        reader.choice("profile", (PROFILE,))
        return cls(reader.text("footprint"), reader.choice("dtype", FLOATS))
