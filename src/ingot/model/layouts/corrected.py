"""Layouts of weights with a product of two thin matrices added; attributes as in ``spec/with_low_rank.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Attributes, Described, Layout, codec_of, file_id, matrix_shape
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.table import layout_within

VERSION = 1
RULE = "with_low_rank.params"
LEFT = "left"
RIGHT = "right"
FACTORS = ("f32", "f16", "bf16")
INNER = (AffineLayout.codec, PaletteLayout.codec, ScaledCodebookLayout.codec)
"""Codecs that may store the matrix."""


@dataclass(frozen=True, slots=True)
class CorrectedLayout:
    """How a matrix and the factors of what is added to it lie.

    Parameters
    ----------
    inner : Layout
        Of the matrix.
    rank : int
        Columns of ``left`` and rows of ``right``.
    dtype : str
        Logical element type, f32, f16 or bf16; the inner layout's too.
    """

    inner: Layout
    rank: int
    dtype: str
    codec: ClassVar[str] = "with_low_rank"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {
            "codec_version": VERSION,
            "rank": self.rank,
            "inner": file_id(self.inner.codec),
            "inner_params": self.inner.attributes(),
            "dtype": self.dtype,
        }

    @classmethod
    def of(cls, tensor: Described) -> CorrectedLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``with_low_rank.params`` and what the inner layout does."""
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        rank = reader.integer("rank", 0, min(matrix_shape(tensor.shape)))
        codec = reader.text("inner")
        params = reader.mapping("inner_params")
        if codec_of(codec) not in INNER:
            raise reader.refuse(f"inner {', '.join(map(file_id, INNER))}", codec)
        if tensor.dtype not in FACTORS:
            raise reader.refuse(f"a tensor of {', '.join(FACTORS)}", tensor.dtype)
        dtype = reader.choice("dtype", (tensor.dtype,))
        return cls(layout_within(tensor, tensor.shape, codec, params), rank, dtype)
