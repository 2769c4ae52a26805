"""Layouts of weights as ASTC texture blocks. Attributes: ``spec/astc.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import FLOATS
from ingot.model.layouts.base import Attributes, LayoutSource

VERSION = 1
RULE = "astc.params"
PROFILE = "ldr"


@dataclass(frozen=True, slots=True)
class AstcLayout:
    """ASTC blocks with one luminance channel, and one scale and one offset for the tensor.

    Parameters
    ----------
    footprint : str
        The size of a block in texels, such as ``6x6``.
    dtype : str
        Logical element type.
    """

    footprint: str
    dtype: str
    codec: ClassVar[str] = "astc"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {"codec_version": VERSION, "footprint": self.footprint, "profile": PROFILE, "dtype": self.dtype}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> AstcLayout:
        """Return the layout from a tensor's attributes. Raises ``CodecError`` ``astc.params``."""
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        reader.choice("profile", (PROFILE,))
        return cls(reader.text("footprint"), reader.choice("dtype", FLOATS))
