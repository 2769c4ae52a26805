"""Tiny models of several parts: a text model that Ingot translates, and a vision model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.support import model_folder
from tests.support.tiny_models import SETTINGS, SHIFTED, SMALL


class Wrapper(NamedTuple):
    """A model of several parts: its class, and settings of its text model, its vision model and itself."""

    model_class: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    outer: Mapping[str, Any]


_MULTIMODAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
_QWEN_TOKENS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
_QWEN3_VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
    "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_IMAGE_TOKEN = {"image_token_index": 300}
WRAPPERS: Mapping[str, Wrapper] = {
    "qwen2_vl": Wrapper(
        "Qwen2VLForConditionalGeneration",
        _MULTIMODAL,
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        _QWEN_TOKENS,
    ),
    "qwen2_5_vl": Wrapper(
        "Qwen2_5_VLForConditionalGeneration",
        _MULTIMODAL,
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
            "fullatt_block_indexes": [1], "window_size": 112,
        },
        _QWEN_TOKENS,
    ),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", _MULTIMODAL, _QWEN3_VISION, _QWEN_TOKENS),
    "qwen3_vl_moe": Wrapper(
        "Qwen3VLMoeForConditionalGeneration",
        {**_MULTIMODAL, "moe_intermediate_size": 48},
        _QWEN3_VISION,
        _QWEN_TOKENS,
    ),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", SETTINGS["qwen3_5_text"], _QWEN3_VISION, _QWEN_TOKENS),
    "qwen3_5_moe": Wrapper(
        "Qwen3_5MoeForConditionalGeneration", SETTINGS["qwen3_5_moe_text"], _QWEN3_VISION, _QWEN_TOKENS
    ),
    "gemma3": Wrapper(
        "Gemma3ForConditionalGeneration",
        {"query_pre_attn_scalar": 16},
        {**_VISION, "image_size": 28},
        {**_IMAGE_TOKEN, "boi_token_index": 301, "eoi_token_index": 302, "mm_tokens_per_image": 4},
    ),
    "mistral3": Wrapper(
        "Mistral3ForConditionalGeneration",
        {"rms_norm_eps": 1e-5},
        {"model_type": "pixtral", **_VISION, "head_dim": 16},
        _IMAGE_TOKEN,
    ),
    "llava": Wrapper(
        "LlavaForConditionalGeneration", {}, {"model_type": "clip_vision_model", **_VISION}, _IMAGE_TOKEN
    ),
    "llama4": Wrapper(
        "Llama4ForConditionalGeneration",
        SETTINGS["llama4_text"],
        {
            **_VISION, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        _IMAGE_TOKEN,
    ),
    "smolvlm": Wrapper("SmolVLMForConditionalGeneration", {}, {**_VISION, "image_size": 28}, {"image_token_id": 300}),
    "idefics3": Wrapper(
        "Idefics3ForConditionalGeneration", {}, {**_VISION, "image_size": 28}, {"image_token_id": 300}
    ),
    "internvl": Wrapper(
        "InternVLForConditionalGeneration",
        {},
        {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": 300},
    ),
    "lfm2_vl": Wrapper(
        "Lfm2VlForConditionalGeneration",
        SETTINGS["lfm2"],
        {**_VISION, "patch_size": 16, "num_patches": 4},
        {"image_token_id": 300},
    ),
}  # fmt: skip
"""By ``model_type``."""
_SEEDS = {"qwen3_5_moe": 5}
"""Seeds of models in which rounding to f16 leaves the choice of experts as it is; 10 for the others."""
OTHER_PARTS = ("*visual.*", "*vision_tower.*", "*vision_model.*", "*multi_modal_projector.*", "*connector.*")
"""Patterns of the names of tensors that do not belong to the text model."""


def write_wrapper(
    model_type: str, path: Any, seed: int | None = None, wrapper: Wrapper | None = None, **text: Any
) -> Any:
    """Save a random model of several parts, with a tokenizer, and return it.

    ``text`` are further settings of its text model. ``wrapper`` replaces the entry of ``WRAPPERS``. Needs the packages
    torch and transformers.
    """
    import torch
    import transformers

    wrapper = wrapper or WRAPPERS[model_type]
    seed = _SEEDS.get(model_type, 10) if seed is None else seed
    config_class: Any = type(transformers.AutoConfig.for_model(model_type))
    default = config_class().text_config
    values = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    settings = {"model_type": default.model_type, **values, **wrapper.text, **text}
    config = config_class(text_config=settings, vision_config=dict(wrapper.vision), **wrapper.outer)
    torch.manual_seed(seed)
    model = getattr(transformers, wrapper.model_class)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    shifted = SHIFTED.get(default.model_type, ())
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight") and not name.endswith(shifted)
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise + float(is_norm))
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(model_folder.tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps(model_folder.SETTINGS))
    return model
