"""Tensors that a target runtime does not need, because it recomputes them or does not use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.tensor import Tensor
from ingot.translate import rotary
from ingot.translate.config_numbers import head_size, is_number
from ingot.translate.families import Family

FREQUENCIES = "rotary_emb.inv_freq"
COMPUTED = (
    *("rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *("embeddings.position_ids", "embeddings.token_type_ids"),
)
"""Buffers that every runtime computes from the hyperparameters."""
MASKS = (".attn.bias", ".attention.bias", ".attn.attention.bias")
"""Causal masks of GPT-2 and its relatives, [1, 1, positions, positions]."""
MASK_VALUES = (".masked_bias",)
"""The number that GPT-2 and its relatives add at masked positions."""
CACHE_SCALES = tuple(
    f".{name}"
    for name in (
        *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale"),
        *("k_zero_point", "v_zero_point", "q_zero_point", "output_zero_point"),
    )
)
"""Scales of attention's quantized keys and values, in the names of vLLM, ModelOpt and compressed-tensors."""
ACTIVATION_SCALES = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".input_offset"),
    *(".activation_scale", "_activation_scale", ".qscale_act", ".act_scale", ".output_scale"),
)
"""Scales for quantizing a layer's input before the multiplication."""

_MAX_SCALES = 1 << 16  # elements of a tensor of scales: one per head or channel
_TOLERANCE = 2e-2  # relative, for frequencies rounded to bf16


def superseded(checkpoint: Checkpoint, name: str, program: str) -> Omission | None:
    """Return the omission of a tensor that ``program`` does not need, by name and shape; None if it may need it.

    All frequencies of the rotary embedding are superseded; ``changed_frequencies`` compares the values.
    """
    if name.endswith((FREQUENCIES, *COMPUTED)):
        return Omission(f"{program} computes it", superseded=True)
    if name.endswith(MASK_VALUES) and checkpoint[name].size == 1:
        return Omission(f"{program} hides positions itself", superseded=True)
    if name.endswith(MASKS) and _is_mask(checkpoint[name].shape):
        return Omission(f"{program} hides positions itself", superseded=True)
    if name.endswith(CACHE_SCALES) and "att" in name and checkpoint[name].size <= _MAX_SCALES:
        return Omission(f"{program} caches keys and values without scales", superseded=True)
    return None


def activation_scale(checkpoint: Checkpoint, name: str, program: str, *, for_blocks: bool) -> Omission | None:
    """Return the omission of a layer's input scale that ``program`` does not use; None for any other tensor.

    If ``for_blocks`` is true, the program uses the input scales of NVFP4 weights, as with GGUF files; these scales are
    then not omitted.
    """
    ending = next((ending for ending in ACTIVATION_SCALES if name.endswith(ending)), None)
    if ending is None or checkpoint[name].size > _MAX_SCALES:
        return None
    weight = checkpoint.get(f"{name.removesuffix(ending)}.weight")
    if weight is None or (for_blocks and _is_nvfp4(weight)):
        return None
    return Omission(f"{program} does not quantize the layer's input", superseded=True)


def changed_frequencies(tensor: Tensor, config: Mapping[str, Any], family: Family) -> Omission | None:
    """Return the omission of a stored ``inv_freq`` that differs from the config's frequencies; None if it does not."""
    theta = rotary.rope_of(config).get("rope_theta", 10000.0)
    if family.latent or rotary.rope_of(config)["rope_type"] != "default" or not is_number(theta) or theta <= 0:
        return None
    size = head_size(config)
    if tensor.shape != (size // 2,) or tensor.codec != DenseLayout.codec:
        return None
    expected = float(theta) ** (-np.arange(0, size - 1, 2, dtype=np.float64) / size)
    if np.allclose(tensor.numpy("f32"), expected, rtol=_TOLERANCE, atol=1e-6):
        return None
    return Omission(f"its values are not those of rope_theta {theta:g} in config.json, which are used instead")


def _is_mask(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def _is_nvfp4(tensor: Tensor) -> bool:
    """Return whether a weight is NVFP4 (4-bit floats with 8-bit scales), the only codec with activation scales."""
    if tensor.codec != ScaledCodebookLayout.codec:
        return False
    layout = ScaledCodebookLayout.from_tensor(tensor)
    return (layout.values, layout.scales) == ("f4_e2m1fn", "f8_e4m3fn")
