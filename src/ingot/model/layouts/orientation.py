"""Along which dimension words of codes are packed: what zTensor 1.2 leaves open and the sizes do not always tell."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, Described

AXIS = "axis"
# What GPTQ's programs say of their layers, which they pack along the inputs: the first dimension of what they store.
_GPTQ = frozenset(("checkpoint_format", "damp_percent", "desc_act", "quant_method", "static_groups", "sym"))


def require_last_axis(reader: Attributes, tensor: Described) -> None:
    """Refuse, by ``affine.axis``, attributes of codes that are packed along another dimension than the last.

    The attribute ``axis`` tells; without it GPTQ's own attributes say that the codes may lie as GPTQ has them.
    """
    rank = max(len(tensor.shape), 1)
    if reader.has(AXIS):
        if reader.integer(AXIS, -rank, rank - 1) % rank != rank - 1:
            raise _refusal(f"attribute {AXIS} {tensor.params[AXIS]}", tensor)
        return
    told = next((key for key in sorted(map(str, tensor.params)) if key in _GPTQ), None)
    if told is not None:
        raise _refusal(f"GPTQ's attribute {told!r} and none that states the {AXIS}", tensor)


def says_no_axis(attributes: Mapping[str, object]) -> bool:
    """Whether attributes of words of codes leave the dimension open; Ingot's own, which have a version, state it."""
    return AXIS not in attributes and "codec_version" not in attributes


def _refusal(found: str, tensor: Described) -> CodecError:
    return CodecError(
        "affine.axis",
        f"expected codes that are packed along the last dimension, found {found}: GPTQ packs along the first; lay the "
        f"codes out anew, with {AXIS} -1",
        where=tensor.name,
    )
