"""The layouts there are, by the id of the codec that decodes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.core.registry import Registry
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Described, Layout, OtherLayout, Shape, codec_of
from ingot.model.layouts.ggml import GgmlBlocksLayout


def codec_name(codec: str, params: Mapping[str, Any], encodings: Iterable[str]) -> str:
    """Name a codec in a few words: integers by bits and what shares a scale (``int4 g64``), ggml's blocks by their type
    (``q4_0``), then the encoding."""
    extra = sorted(set(encodings) - {"raw"})
    if codec == AffineLayout.codec and "bits" in params:
        group = params.get("group_size")
        return " ".join([f"int{params['bits']}", f"g{group}" if group else str(params.get("granularity", "")), *extra])
    if codec == GgmlBlocksLayout.codec and "type" in params:
        return " ".join([str(params["type"]), *extra])
    return " ".join([codec, *extra])


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
        ("tca_tbe", "ingot.model.layouts.dense:TcaLayout"),
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
