"""The registry of layouts by codec, and the functions that read the layout of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.core.registry import Registry
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import Layout, LayoutSource, OtherLayout, Shape, codec_of
from ingot.model.layouts.ggml import GgmlBlocksLayout


def codec_name(codec: str, params: Mapping[str, Any], encodings: Iterable[str]) -> str:
    """Return a short name of a codec with its parameters and encodings, such as ``int4 g64`` or ``q4_0 zstd``."""
    extra = sorted(set(encodings) - {"raw"})
    if codec == AffineLayout.codec and "bits" in params:
        group = params.get("group_size")
        return " ".join([f"int{params['bits']}", f"g{group}" if group else str(params.get("granularity", "")), *extra])
    if codec == GgmlBlocksLayout.codec and "type" in params:
        return " ".join([str(params["type"]), *extra])
    return " ".join([codec, *extra])


class _Family(Protocol):
    def from_tensor(self, tensor: LayoutSource) -> Layout: ...


LAYOUTS: Registry[_Family] = Registry(
    "layout",
    (
        ("dense", "ingot.model.layouts.dense:DenseLayout"),
        ("affine", "ingot.model.layouts.affine:AffineLayout"),
        ("affine_words", "ingot.model.layouts.packed_ints:PackedIntLayout"),
        ("palette", "ingot.model.layouts.palette:PaletteLayout"),
        ("scaled_codebook", "ingot.model.layouts.scaled_codebook:ScaledCodebookLayout"),
        ("trellis", "ingot.model.layouts.trellis:TrellisLayout"),
        ("ggml_blocks", "ingot.model.layouts.ggml:GgmlBlocksLayout"),
        ("with_low_rank", "ingot.model.layouts.low_rank:CorrectedLayout"),
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
    """The attributes of an inner tensor, from which its layout is read."""

    name: str
    shape: Shape
    dtype: str
    codec: str
    params: Mapping[str, Any]
    part_dtypes: Mapping[str, str]
    part_nbytes: Mapping[str, int | None]


def layout_of(tensor: LayoutSource) -> Layout:
    """Return the layout of a tensor; an ``OtherLayout`` if the codec has no registered layout.

    Raises
    ------
    CodecError
        ``<family>.params`` and the family's other rules: an attribute is missing or invalid.
    """
    return (
        LAYOUTS[tensor.codec].from_tensor(tensor)
        if tensor.codec in LAYOUTS
        else OtherLayout(tensor.codec, tensor.params)
    )


def inner_source(tensor: LayoutSource, shape: Shape, codec: str, params: Mapping[str, Any]) -> LayoutSource:
    """Return the source from which the layout of an inner tensor is read.

    ``tensor`` contains the inner tensor, whose shape, codec and attributes are the other arguments.
    """
    return _Within(tensor.name, shape, tensor.dtype, codec, params, tensor.part_dtypes, tensor.part_nbytes)


def inner_layout(tensor: LayoutSource, shape: Shape, stored: str, params: Mapping[str, Any]) -> Layout:
    """Return the inner layout of a tensor. ``stored`` is the id of the inner codec in files."""
    return layout_of(inner_source(tensor, shape, codec_of(stored), params))
