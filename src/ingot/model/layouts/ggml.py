"""Layouts of ggml's blocks: consecutive blocks with the elements of a row and their scales (``spec/gguf.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, LayoutSource, Shape, element_count, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "ggml_blocks.params"
BLOCKS = "blocks"
DTYPE = "f32"


class BlockType(NamedTuple):
    """A type of block: its elements, its bytes, and in ``wide`` the offset and size of each number of several bytes."""

    elements: int
    nbytes: int
    wide: tuple[tuple[int, int], ...] = ((0, 2),)


def _halves(start: int, count: int, size: int = 2) -> tuple[tuple[int, int], ...]:
    return tuple((start + size * index, size) for index in range(count))


TYPES: Mapping[str, BlockType] = {
    "q1_0": BlockType(128, 18),
    "q2_0": BlockType(64, 18),
    "q4_0": BlockType(32, 18),
    "q4_1": BlockType(32, 20, _halves(0, 2)),
    "q5_0": BlockType(32, 22, ((0, 2), (2, 4))),
    "q5_1": BlockType(32, 24, ((0, 2), (2, 2), (4, 4))),
    "q8_0": BlockType(32, 34),
    "q2_k": BlockType(256, 84, _halves(80, 2)),
    "q3_k": BlockType(256, 110, ((108, 2),)),
    "q4_k": BlockType(256, 144, _halves(0, 2)),
    "q5_k": BlockType(256, 176, _halves(0, 2)),
    "q6_k": BlockType(256, 210, ((208, 2),)),
    "iq1_s": BlockType(256, 50, (*_halves(0, 1), *_halves(34, 8))),
    "iq1_m": BlockType(256, 56, _halves(48, 4)),
    "iq2_xxs": BlockType(256, 66, _halves(0, 33)),
    "iq2_xs": BlockType(256, 74, _halves(0, 33)),
    "iq2_s": BlockType(256, 82),
    "iq3_xxs": BlockType(256, 98, (*_halves(0, 1), *_halves(66, 8, 4))),
    "iq3_s": BlockType(256, 110),
    "iq4_nl": BlockType(32, 18),
    "iq4_xs": BlockType(256, 136, _halves(0, 2)),
    "tq1_0": BlockType(256, 54, ((52, 2),)),
    "tq2_0": BlockType(256, 66, ((64, 2),)),
    "mxfp4": BlockType(32, 17, ()),
    "nvfp4": BlockType(64, 36, ()),
}
"""The block types in ``ggml-common.h`` of llama.cpp at 0c1e570."""


@dataclass(frozen=True, slots=True)
class GgmlBlocksLayout:
    """Blocks of one type, row by row.

    Parameters
    ----------
    type : str
        A key of ``TYPES``. The elements of a block divide the columns.
    """

    type: str
    codec: ClassVar[str] = "ggml_blocks"
    dtype: ClassVar[str] = DTYPE

    @property
    def block(self) -> BlockType:
        """The type of the blocks."""
        return TYPES[self.type]

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw part of a tensor of ``shape``."""
        return (PartSpec(BLOCKS, "u8", element_count(shape) // self.block.elements * self.block.nbytes),)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {"codec_version": VERSION, "type": self.type, "dtype": DTYPE}

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> GgmlBlocksLayout:
        """Return the layout from a tensor's attributes.

        Raises ``CodecError`` ``ggml_blocks.params`` or ``ggml_blocks.columns``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        reader.choice("dtype", (DTYPE,))
        layout = cls(reader.choice("type", tuple(TYPES)))
        cols = matrix_shape(tensor.shape)[1]
        if cols % layout.block.elements:
            raise CodecError(
                "ggml_blocks.columns",
                f"expected columns in whole blocks of {layout.block.elements}, found {cols}",
                where=tensor.name,
            )
        return layout
