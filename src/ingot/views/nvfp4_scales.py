"""Views of NVFP4 tensors that make the second scale a separate tensor (llama.cpp's ``X.scale``), or undo that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ingot.codecs.blocks.from_blocks import unpack_blocks
from ingot.codecs.scaled_codebook.repack import Second, second_scale
from ingot.codecs.table import CODECS
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.alternatives import CODEBOOKS
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import DIVIDE, MULTIPLY, SECOND, ScaledCodebookLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.views.common import BuildTensor, view_of

WEIGHT = ".weight"
SCALE = ".scale"
_NVFP4 = replace(CODEBOOKS["nvfp4"], second=MULTIPLY)


def split_second_scales(checkpoint: Checkpoint, _: object = None) -> Checkpoint:
    """Return the checkpoint with the second scales of NVFP4 tensors as separate tensors.

    llama.cpp multiplies a layer's output by ``X.scale``. Other formats multiply the weights' scales by the second
    scale, or divide them by it (compressed-tensors). A divisor is replaced by its reciprocal if values are then equal
    in their dtype. If there are no tensors to split, ``checkpoint`` itself is returned.
    """
    entries: list[tuple[str, BuildTensor | None, str]] = []
    for name, tensor in checkpoint.items():
        scale = name.removesuffix(WEIGHT) + SCALE
        if tensor.codec != ScaledCodebookLayout.codec or not name.endswith(WEIGHT) or scale in checkpoint:
            entries.append((name, None, name))
            continue
        layout = ScaledCodebookLayout.from_tensor(tensor)
        second = _multiplier(tensor, layout)
        if second is None:
            entries.append((name, None, name))
            continue
        entries += [(name, _weight(tensor, layout), name), (scale, _scale(tensor, scale, second), name)]
    return (
        checkpoint if len(entries) == len(checkpoint) else view_of(checkpoint, entries, split_second_scales, None, {})
    )


def rounded_second_scales(checkpoint: Checkpoint) -> list[str]:
    """Return the tensors whose values are equal in their dtype, but not in f32, after ``split_second_scales``."""
    return [
        name
        for name, tensor in checkpoint.items()
        if tensor.codec == ScaledCodebookLayout.codec
        and name.endswith(WEIGHT)
        and (second := _multiplier(tensor, ScaledCodebookLayout.from_tensor(tensor))) is not None
        and second.rounded
    ]


def join_second_scales(checkpoint: Checkpoint, _: object = None) -> Checkpoint:
    """Return the checkpoint with NVFP4 blocks and their ``X.scale`` joined into one tensor.

    The blocks are read. A tensor with scales that the joined layout cannot represent remains unchanged, with its
    ``X.scale``. If there are no tensors to join, ``checkpoint`` itself is returned.
    """
    joined_tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        scale = checkpoint.get(name.removesuffix(WEIGHT) + SCALE) if name.endswith(WEIGHT) else None
        if scale is None or scale.codec != DenseLayout.codec or (scale.dtype, scale.size) != ("f32", 1):
            continue
        if tensor.codec == GgmlBlocksLayout.codec and GgmlBlocksLayout.from_tensor(tensor).type == "nvfp4":
            unpacked = unpack_blocks(tensor)
            if unpacked is not None:
                parts = {**unpacked.parts, SECOND: scale.parts[DATA]}
                joined_tensors[name] = Tensor.from_parts(_NVFP4, parts, tensor.shape, name)
    removed = {name.removesuffix(WEIGHT) + SCALE for name in joined_tensors}
    entries = [
        (name, _build_constant(joined_tensors[name]) if name in joined_tensors else None, name)
        for name in checkpoint
        if name not in removed
    ]
    origins = {name: (name, name.removesuffix(WEIGHT) + SCALE) for name in joined_tensors}
    return view_of(checkpoint, entries, join_second_scales, None, {}, origins) if joined_tensors else checkpoint


def _weight(tensor: Tensor, layout: ScaledCodebookLayout) -> BuildTensor:
    parts = {role: part for role, part in tensor.parts.items() if role != SECOND}
    return _build_constant(replace(tensor, parts=parts, params=replace(layout, second=None).attributes()))


def _multiplier(tensor: Tensor, layout: ScaledCodebookLayout) -> Second | None:
    """Return the second scale of an NVFP4 tensor as a multiplier of its scales.

    Returns None if the tensor has another layout, or if its second scale is a divisor that no f32 multiplier can
    replace.
    """
    multiplied = replace(_NVFP4, dtype=layout.dtype)
    if layout not in (multiplied, replace(multiplied, second=DIVIDE)) or tensor.shape[-1] % TYPES["nvfp4"].elements:
        return None
    multiplier = second_scale(tensor, layout, multiplied)
    return None if isinstance(multiplier, str) else multiplier


def _scale(tensor: Tensor, name: str, second: Second) -> BuildTensor:
    part = tensor.parts[SECOND]
    codec = CODECS[DenseLayout.codec]
    if ScaledCodebookLayout.from_tensor(tensor).second == DIVIDE:
        part = memory_part(np.array([second.value], np.float32), "f32")
    return _build_constant(Tensor(name, (1,), "f32", DenseLayout.codec, {DATA: part}, {}, codec))


def _build_constant(tensor: Tensor) -> BuildTensor:
    return lambda: tensor
