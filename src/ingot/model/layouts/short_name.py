"""What reports call a stored tensor's codec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ingot.model.layouts.affine import AffineLayout
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
