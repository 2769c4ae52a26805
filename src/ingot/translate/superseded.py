"""Tensors that a target's program has no use for: it computes their values itself, or has no such computation."""

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
from ingot.translate.families import Family
from ingot.translate.numbers import head_size, is_number

FREQUENCIES = "rotary_emb.inv_freq"
COMPUTED = (
    *("rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *("embeddings.position_ids", "embeddings.token_type_ids"),
)
"""Buffers that every program computes from the hyperparameters."""
MASKS = (".attn.bias", ".attention.bias", ".attn.attention.bias")
"""Causal masks of GPT-2 and its relatives, [1, 1, positions, positions]."""
MASKED = (".masked_bias",)
"""What GPT-2 and its relatives add where their mask hides a position: one number."""
CACHE_SCALES = tuple(
    f".{what}"
    for what in (
        *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale"),
        *("k_zero_point", "v_zero_point", "q_zero_point", "output_zero_point"),
    )
)
"""Scales of quantized keys and values, by the names of vLLM, ModelOpt and compressed-tensors; of attention alone."""
ACTIVATION_SCALES = (
    *(".input_scale", ".input_global_scale", ".input_zero_point", ".input_offset"),
    *(".activation_scale", "_activation_scale", ".qscale_act", ".act_scale", ".output_scale"),
)
"""Scales by which a layer's input is quantized before it is multiplied."""

_MAX_SCALES = 1 << 16  # numbers in a tensor that is taken for scales: one for each head or channel
_TOLERANCE = 2e-2  # of frequencies that were rounded to bf16


def superseded(checkpoint: Checkpoint, name: str, program: str) -> Omission | None:
    """Return why ``program`` needs no tensor of this name and shape; None if it may need it.

    Frequencies of the rotary embedding count as computed; ``frequencies`` compares them with the hyperparameters.
    """
    if name.endswith((FREQUENCIES, *COMPUTED)):
        return Omission(f"{program} computes it", superseded=True)
    if name.endswith(MASKED) and checkpoint[name].size == 1:
        return Omission(f"{program} hides positions itself", superseded=True)
    if name.endswith(MASKS) and _is_mask(checkpoint[name].shape):
        return Omission(f"{program} hides positions itself", superseded=True)
    if name.endswith(CACHE_SCALES) and "att" in name and checkpoint[name].size <= _MAX_SCALES:
        return Omission(f"{program} keeps keys and values without scales", superseded=True)
    return None


def activation_scale(checkpoint: Checkpoint, name: str, program: str, *, for_blocks: bool) -> Omission | None:
    """Return why ``program`` needs no scale of a layer's input; None if the tensor is none, or has a use.

    With ``for_blocks`` the scale of a weight in NVFP4 has a use, as it has in GGUF.
    """
    ending = next((ending for ending in ACTIVATION_SCALES if name.endswith(ending)), None)
    if ending is None or checkpoint[name].size > _MAX_SCALES:
        return None
    weight = checkpoint.get(f"{name.removesuffix(ending)}.weight")
    if weight is None or (for_blocks and _is_nvfp4(weight)):
        return None
    return Omission(f"{program} multiplies the layer's input as it is", superseded=True)


def frequencies(tensor: Tensor, config: Mapping[str, Any], family: Family) -> Omission | None:
    """Return why a stored ``inv_freq`` is lost: it differs from what the hyperparameters give; None if it does not."""
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
    """Return whether a weight is stored as 4-bit floats with scales in 8 bits, the one type with activation scales."""
    if tensor.codec != ScaledCodebookLayout.codec:
        return False
    layout = ScaledCodebookLayout.from_tensor(tensor)
    return (layout.values, layout.scales) == ("f4_e2m1fn", "f8_e4m3fn")
