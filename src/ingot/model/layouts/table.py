"""The layouts there are, by the id of the codec that decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.core.registry import Registry
from ingot.model.layouts.base import Described, Layout, OtherLayout, Shape
from ingot.model.layouts.ids import codec_of


class _Family(Protocol):
    def of(self, tensor: Described) -> Layout: ...


LAYOUTS: Registry[_Family] = Registry(
    "layout",
    (
        ("dense", "ingot.model.layouts.dense:DenseLayout"),
        ("affine", "ingot.model.layouts.affine:AffineLayout"),
        ("affine_words", "ingot.model.layouts.packed_words:WordsLayout"),
        ("palette", "ingot.model.layouts.palette:PaletteLayout"),
        ("scaled_codebook", "ingot.model.layouts.scaled_codebook:ScaledCodebookLayout"),
        ("trellis", "ingot.model.layouts.trellis:TrellisLayout"),
        ("ggml_blocks", "ingot.model.layouts.ggml:GgmlBlocksLayout"),
        ("with_low_rank", "ingot.model.layouts.corrected:CorrectedLayout"),
        ("sparse_csr", "ingot.model.layouts.sparse:CsrLayout"),
        ("sparse_coo", "ingot.model.layouts.sparse:CooLayout"),
        ("sparse_mask", "ingot.model.layouts.sparse:MaskLayout"),
        ("sparse_blocks", "ingot.model.layouts.sparse:BlocksLayout"),
        ("tca_tbe", "ingot.model.layouts.lossless:TcaLayout"),
        ("astc", "ingot.model.layouts.texture:AstcLayout"),
        ("sparse_patch", "ingot.model.layouts.delta:PatchLayout"),
        ("delta_sparse", "ingot.model.layouts.delta:SparseDeltaLayout"),
        ("delta_sign", "ingot.model.layouts.delta:SignDeltaLayout"),
        ("delta_int4", "ingot.model.layouts.delta:Int4DeltaLayout"),
    ),
)


@dataclass(frozen=True, slots=True)
class _Within:
    """What is stored within another layout, as a tensor of its own."""

    name: str
    shape: Shape
    dtype: str
    codec: str
    params: Mapping[str, Any]
    part_dtypes: Mapping[str, str]
    part_nbytes: Mapping[str, int | None]


def layout_of(tensor: Described) -> Layout:
    """Return how a tensor is stored; an ``OtherLayout`` where only its codec can tell, or none is known.

    Raises
    ------
    CodecError
        ``<family>.params`` and the other rules that a family has for attributes: one is missing or makes no sense.
    """
    return LAYOUTS[tensor.codec].of(tensor) if tensor.codec in LAYOUTS else OtherLayout(tensor.codec, tensor.params)


def within(tensor: Described, shape: Shape, codec: str, params: Mapping[str, Any]) -> Described:
    """Return what a tensor stores within its own layout as a tensor of its own."""
    return _Within(tensor.name, shape, tensor.dtype, codec, params, tensor.part_dtypes, tensor.part_nbytes)


def layout_within(tensor: Described, shape: Shape, stored: str, params: Mapping[str, Any]) -> Layout:
    """Return the layout of what a tensor stores within its own; ``stored`` is the codec's id as files spell it."""
    return layout_of(within(tensor, shape, codec_of(stored), params))
