"""Layouts of a matrix plus a low-rank correction. Attributes: ``spec/with_low_rank.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Attributes, Layout, LayoutSource, codec_of, file_id, matrix_shape
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.table import inner_layout

VERSION = 1
RULE = "with_low_rank.params"
LEFT_FACTOR = "left"
RIGHT_FACTOR = "right"
FACTORS = ("f32", "f16", "bf16")
INNER = (AffineLayout.codec, PaletteLayout.codec, ScaledCodebookLayout.codec)
"""Codecs that may store the matrix."""


@dataclass(frozen=True, slots=True)
class CorrectedLayout:
    """The arrangement of a matrix and the two factors of a correction that is added to it.

    Parameters
    ----------
    inner : Layout
        The layout of the matrix.
    rank : int
        Columns of ``left`` and rows of ``right``.
    dtype : str
        Logical element type, f32, f16 or bf16; equal to that of the inner layout.
    """

    inner: Layout
    rank: int
    dtype: str
    codec: ClassVar[str] = "with_low_rank"

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {
            "codec_version": VERSION,
            "rank": self.rank,
            "inner": file_id(self.inner.codec),
            "inner_params": self.inner.attributes(),
            "dtype": self.dtype,
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> CorrectedLayout:
        """Return the layout from a tensor's attributes.

        Raises ``CodecError`` ``with_low_rank.params`` and the errors of the inner layout.
        """
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
        return cls(inner_layout(tensor, tensor.shape, codec, params), rank, dtype)
