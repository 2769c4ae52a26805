"""The dimension along which codes are packed into words, which zTensor 1.2 does not specify."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, LayoutSource

AXIS = "axis"
# Attributes that GPTQ tools write. They pack codes along the inputs, the first dimension of the stored matrix.
_GPTQ = frozenset(("checkpoint_format", "damp_percent", "desc_act", "quant_method", "static_groups", "sym"))


def require_last_axis(reader: Attributes, tensor: LayoutSource) -> None:
    """Raise ``CodecError`` ``affine.axis`` if codes may be packed along another dimension than the last.

    The attribute ``axis`` states the dimension. Without it, attributes of GPTQ indicate that the codes may be packed
    along the first dimension.
    """
    rank = max(len(tensor.shape), 1)
    if reader.has(AXIS):
        if reader.integer(AXIS, -rank, rank - 1) % rank != rank - 1:
            raise _refusal(f"attribute {AXIS} {tensor.params[AXIS]}", tensor)
        return
    gptq_key = next((key for key in sorted(map(str, tensor.params)) if key in _GPTQ), None)
    if gptq_key is not None:
        raise _refusal(f"GPTQ's attribute {gptq_key!r} without an attribute {AXIS}", tensor)


def lacks_axis(attributes: Mapping[str, object]) -> bool:
    """Return whether attributes do not state the dimension along which codes are packed into words.

    Ingot's attributes, which have a ``codec_version``, determine it.
    """
    return AXIS not in attributes and "codec_version" not in attributes


def _refusal(description: str, tensor: LayoutSource) -> CodecError:
    return CodecError(
        "affine.axis",
        f"expected codes that are packed along the last dimension, found {description}: GPTQ packs along the first; "
        f"repack the codes with {AXIS} -1",
        where=tensor.name,
    )
