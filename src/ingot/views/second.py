"""Views of NVFP4: the second scale of a tensor as a tensor of its own, as llama.cpp has it (``X.scale``), and back."""

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
from ingot.views.common import Make, view_of

WEIGHT = ".weight"
SCALE = ".scale"
_NVFP4 = replace(CODEBOOKS["nvfp4"], second=MULTIPLY)


def part_seconds(checkpoint: Checkpoint, _: object = None) -> Checkpoint:
    """Return the checkpoint with the second scales of NVFP4 as tensors of their own; itself where there are none.

    llama.cpp multiplies a layer's output by ``X.scale``, where others multiply the scales of its weights, or divide
    them by it (compressed-tensors): then it is a reciprocal, with which values are equal in their own type at least.
    """
    entries: list[tuple[str, Make | None, str]] = []
    for name, tensor in checkpoint.items():
        scale = name.removesuffix(WEIGHT) + SCALE
        if tensor.codec != ScaledCodebookLayout.codec or not name.endswith(WEIGHT) or scale in checkpoint:
            entries.append((name, None, name))
            continue
        layout = ScaledCodebookLayout.from_tensor(tensor)
        second = _second(tensor, layout)
        if second is None:
            entries.append((name, None, name))
            continue
        entries += [(name, _weight(tensor, layout), name), (scale, _scale(tensor, scale, second), name)]
    return checkpoint if len(entries) == len(checkpoint) else view_of(checkpoint, entries, part_seconds, None, {})


def rounded_seconds(checkpoint: Checkpoint) -> list[str]:
    """Return the tensors whose values ``part_seconds`` keeps in their own type, and not all of them in f32."""
    return [
        name
        for name, tensor in checkpoint.items()
        if tensor.codec == ScaledCodebookLayout.codec
        and name.endswith(WEIGHT)
        and (second := _second(tensor, ScaledCodebookLayout.from_tensor(tensor))) is not None
        and second.rounded
    ]


def join_seconds(checkpoint: Checkpoint, _: object = None) -> Checkpoint:
    """Return the checkpoint with blocks of NVFP4 and their ``X.scale`` as one tensor; itself where there are none.

    Reads the blocks: those with a scale that only blocks have stay as they are.
    """
    joined: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        scale = checkpoint.get(name.removesuffix(WEIGHT) + SCALE) if name.endswith(WEIGHT) else None
        if scale is None or scale.codec != DenseLayout.codec or (scale.dtype, scale.size) != ("f32", 1):
            continue
        if tensor.codec == GgmlBlocksLayout.codec and GgmlBlocksLayout.from_tensor(tensor).type == "nvfp4":
            apart = unpack_blocks(tensor)
            if apart is not None:
                parts = {**apart.parts, SECOND: scale.parts[DATA]}
                joined[name] = Tensor.from_parts(_NVFP4, parts, tensor.shape, name)
    gone = {name.removesuffix(WEIGHT) + SCALE for name in joined}
    entries = [
        (name, _given(joined[name]) if name in joined else None, name) for name in checkpoint if name not in gone
    ]
    origins = {name: (name, name.removesuffix(WEIGHT) + SCALE) for name in joined}
    return view_of(checkpoint, entries, join_seconds, None, {}, origins) if joined else checkpoint


def _weight(tensor: Tensor, layout: ScaledCodebookLayout) -> Make:
    parts = {role: part for role, part in tensor.parts.items() if role != SECOND}
    return _given(replace(tensor, parts=parts, params=replace(layout, second=None).attributes()))


def _second(tensor: Tensor, layout: ScaledCodebookLayout) -> Second | None:
    """Return what the scales of NVFP4 are multiplied by; None where it is none, or no number says it."""
    multiplied = replace(_NVFP4, dtype=layout.dtype)
    if layout not in (multiplied, replace(multiplied, second=DIVIDE)) or tensor.shape[-1] % TYPES["nvfp4"].elements:
        return None
    found = second_scale(tensor, layout, multiplied)
    return None if isinstance(found, str) else found


def _scale(tensor: Tensor, name: str, second: Second) -> Make:
    part = tensor.parts[SECOND]
    codec = CODECS[DenseLayout.codec]
    if ScaledCodebookLayout.from_tensor(tensor).second == DIVIDE:
        part = memory_part(np.array([second.value], np.float32), "f32")
    return _given(Tensor(name, (1,), "f32", DenseLayout.codec, {DATA: part}, {}, codec))


def _given(tensor: Tensor) -> Make:
    return lambda: tensor
