"""Settings of tiny models of each family that Ingot translates into GGUF, for transformers' config classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support import model_folder

SMALL: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "head_dim": 16, "bos_token_id": None,
    "eos_token_id": 259, "pad_token_id": 257, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
"""Values for every config class that has the key."""
_LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "q_lora_rank": 32,
}  # fmt: skip
_GROUPED = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_HYBRID = {"layer_types": ["conv", "full_attention"]}
_WINDOW = {"num_hidden_layers": 5, "sliding_window": 8}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 8, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
_LARGE_HEADS = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "nomic_bert", "modernbert")
"""Families without a head."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {}, "mistral": {}, "mixtral": {}, "qwen2": {}, "qwen2_moe": {}, "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True}, "gemma": {}, "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16}, "phi3": {}, "starcoder2": {}, "gpt_oss": {},
    "deepseek_v2": {**_LATENT, **_GROUPED, "q_lora_rank": None, "topk_method": "greedy"},
    **{key: {**_LATENT, **_GROUPED, "n_group": 2} for key in ("deepseek_v3", "kimi_k2")},
    "bert": {}, "roberta": {"pad_token_id": 1}, "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    "arcee": {}, "cohere": {}, "cohere2": _WINDOW, "ernie4_5": {}, "ernie4_5_moe": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "exaone_moe": _WINDOW,
    "glm": {}, "glm4": {}, "glm4_moe": _GROUPED, "glm4_moe_lite": {**_LATENT, **_GROUPED}, "granite": {},
    "granitemoe": {},
    "glm_moe_dsa": {**_LATENT, **_GROUPED, "index_topk": 8, "index_head_dim": 128, "index_n_heads": 16},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "position_embedding_type": "nope",
    },
    "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {}, "internlm3": {}, "ministral": {},
    "ministral3": {"rope_parameters": _YARN}, "minicpm3": _LATENT, "minimax_m2": {}, "nemotron": {}, "olmo": {},
    "olmo2": {}, "olmo3": _WINDOW, "olmoe": {"num_key_value_heads": 4}, "phi": {}, "seed_oss": {},
    "smollm3": {"num_hidden_layers": 5},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 4},
    "gpt2": _GPT, "gpt_bigcode": _GPT, "gpt_neox": {}, "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "dots1": {**_GROUPED, "n_shared_experts": 1, "num_key_value_heads": 4},
    "afmoe": {**_WINDOW, "num_dense_layers": 1, "mup_enabled": True},
    "mamba": {"state_size": 16, "intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "jamba": {
        "mamba_d_state": 16, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 8,
    },
    "apertus": {}, "nomic_bert": {}, "modernbert": {"num_hidden_layers": 5, "local_attention": 8},
    "llama4_text": {
        "num_hidden_layers": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
    },
    "qwen3_next": _LINEAR, "qwen3_5_text": {**_LINEAR, **_LARGE_HEADS}, "qwen3_5_moe_text": {**_LINEAR, **_LARGE_HEADS},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    },
    "lfm2": {**_HYBRID, "block_multiple_of": 32}, "lfm2_moe": {**_HYBRID, "num_dense_layers": 1},
}  # fmt: skip
"""Further values by model type."""


SAME_CLASS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Families that transformers has under another model type."""
_ALL_NORMS = ("norm.weight",)
_LINEAR_NORMS = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
SHIFTED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _ALL_NORMS),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR_NORMS),
}
"""Endings of the names of norms that multiply by 1 + w."""


def write_model(model_type: str, path: Any, seed: int = 5) -> Any:
    """Save a random model of a family, with a tokenizer, and return the model as it was saved.

    Needs the packages torch and transformers.
    """
    import torch
    import transformers

    config_class = type(transformers.AutoConfig.for_model(SAME_CLASS.get(model_type, model_type)))
    default = config_class()
    values = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    config = config_class(**{**values, **SETTINGS[model_type]})
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModel if model_type in ENCODERS else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, values_of in [*model.named_parameters(), *model.named_buffers()]:
        if not values_of.is_floating_point() or "inv_freq" in name or "scale" in name:
            continue
        is_norm = values_of.ndim == 1 and name.endswith("weight") and not name.endswith(SHIFTED.get(model_type, ()))
        noise = 0.1 * torch.randn(values_of.shape, generator=generator)
        values_of.data.copy_((noise.abs() if "A_log" in name else noise) + float(is_norm))
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(model_folder.tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps(model_folder.SETTINGS))
    saved = auto.from_pretrained(path, dtype=torch.float32).eval()
    if model_type in SAME_CLASS:
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace(f'"{SAME_CLASS[model_type]}"', f'"{model_type}"'))
    return saved
