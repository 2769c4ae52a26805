"""The ``config.json`` that mlx_lm reads, computed from the ``config.json`` of transformers 5.

mlx_lm's modules read the keys of earlier releases: ``rope_theta`` and ``rope_scaling`` instead of the object
``rope_parameters``, and keys that transformers omits if they have the default value. If a key is missing, a module uses
its own default, which may differ. All other keys stay, except for values that transformers 5 has renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_PATTERN = "sliding_window_pattern"

Value = Callable[[Mapping[str, Any]], Any]
"""A function that returns the value of a key, given a config with the rotary parameters at its top level."""


def config_for_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the keys that mlx_lm reads; the other keys are unchanged."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": _with_missing_keys(text, str(text.get("model_type")))}
    return _with_missing_keys(config, str(config.get("model_type")))


def _with_missing_keys(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    result = dict(config)
    for key, value in _rotary_keys(config).items():
        if result.get(key) is None:
            result[key] = value
    for key, value_of in _KEYS.get(model_type, {}).items():
        if result.get(key) is None and (value := value_of(result)) is not None:
            result[key] = value
    for key in _NULLS.get(model_type, ()):
        result.setdefault(key, None)
    for key, names in _RENAMED_LAYERS.get(model_type, {}).items():
        if isinstance(layers := result.get(key), list):
            result[key] = [names.get(layer, layer) if isinstance(layer, str) else layer for layer in layers]
    period = result.get(_PATTERN)
    if model_type == "exaone4" and isinstance(period, int) and 0 < period < 1 << 16:
        result[_PATTERN] = "L" * (period - 1) + "G"
    return result


def _rotary_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the older keys of the rotary embedding; empty without ``rope_parameters``."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    full, sliding = (rope.get(key) for key in (_FULL, _SLIDING))
    if not (isinstance(full, Mapping) or isinstance(sliding, Mapping)):
        return _flat_rotary_keys(rope)
    keys = _flat_rotary_keys(full if isinstance(full, Mapping) else {})
    if isinstance(sliding, Mapping) and "rope_theta" in sliding:
        keys |= dict.fromkeys(("rope_local_base_freq", "swa_rope_theta"), sliding["rope_theta"])
    return keys


def _flat_rotary_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    keys = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in keys}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type != "default":
        keys["rope_scaling"] = {**scaling, "rope_type": rope_type, "type": rope_type}
    return keys


def _same(key: str) -> Value:
    return lambda config: config.get(key)


def _constant(value: Any) -> Value:
    return lambda config: value


def _head_size(config: Mapping[str, Any]) -> int | None:
    hidden, heads = (config.get(key) for key in ("hidden_size", "num_attention_heads"))
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _rotary_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("head_dim") or _head_size(config)
    share = config.get("partial_rotary_factor", 1.0)
    return int(size * share) if isinstance(size, int) and isinstance(share, int | float) else None


def _period(config: Mapping[str, Any]) -> int | None:
    """Return the period of ``layer_types`` if the last layer of each period has full attention; else None."""
    layers = config.get("layer_types")
    if not isinstance(layers, list) or _FULL not in layers:
        return None
    period = layers.index(_FULL) + 1
    repeats = all((layer == _FULL) == ((index + 1) % period == 0) for index, layer in enumerate(layers))
    return period if repeats else None


def _sparse_layers(config: Mapping[str, Any]) -> list[bool] | None:
    count, layers = (config.get(key) for key in ("num_hidden_layers", "mlp_layer_types"))
    if isinstance(layers, list):
        return [layer == "sparse" for layer in layers]
    first = config.get("first_k_dense_replace")
    return [index >= first for index in range(count)] if isinstance(count, int) and isinstance(first, int) else None


def _flags(key: str, item: str) -> Value:
    """Return a function that computes one number per layer from a config.

    The number is 1 if the layer's entry in the config's list ``key`` equals ``item``, else 0.
    """

    def flags(config: Mapping[str, Any]) -> list[int] | None:
        layers = config.get(key)
        return [int(layer == item) for layer in layers] if isinstance(layers, list) else None

    return flags


def _expanded_size(config: Mapping[str, Any]) -> int | None:
    hidden, factor = (config.get(key) for key in ("hidden_size", "expand"))
    return int(hidden * factor) if isinstance(hidden, int) and isinstance(factor, int | float) else None


def _unscaled_yarn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN parameters with the factor 1, for a module that requires a scaling."""
    positions = config.get("max_position_embeddings")
    return {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": positions}


def _ones(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "longrope", "short_factor": 1.0, "long_factor": 1.0}


_SIGMOID = {"topk_method": _constant("noaux_tc"), "scoring_func": _constant("sigmoid"), "moe_layer_freq": _constant(1)}
_EXPERTS = {"num_experts": _same("num_local_experts"), "head_dim": _head_size}

_KEYS: Mapping[str, Mapping[str, Value]] = {
    "apertus": {"mlp_bias": _constant(False), "post_norm": _constant(False), "qk_norm": _constant(True)},
    "cohere2": {"sliding_window_pattern": _period},
    "deepseek_v2": {"rope_scaling": _unscaled_yarn},
    "exaone4": {"head_dim": _head_size},
    "exaone_moe": {"head_dim": _head_size, "is_moe_layer": _sparse_layers},
    "falcon_h1": {"head_dim": _head_size},
    "gemma3_text": {"sliding_window_pattern": _period},
    "glm4_moe": {"head_dim": _head_size},
    "glm_moe_dsa": _SIGMOID,
    "gpt2": {"n_ctx": _same("n_positions")},
    "gpt_bigcode": {"n_inner": lambda config: 4 * config["n_embd"] if isinstance(config.get("n_embd"), int) else None},
    "gpt_neox": {"rotary_emb_base": _same("rope_theta"), "rotary_pct": _same("partial_rotary_factor")},
    "granitemoehybrid": {"position_embedding_type": _constant("nope")},
    "lfm2": {"block_dim": _same("hidden_size")},
    "mamba2": {"intermediate_size": _expanded_size},
    "mellum": _EXPERTS,
    "minicpm3": {"rope_scaling": _ones},
    "minimax_m2": {"shared_intermediate_size": _constant(0), "rotary_dim": _rotary_size},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {"full_attention_interval": _period},
    "qwen3_5_text": {"full_attention_interval": _period},
    "qwen3_5_moe_text": {"full_attention_interval": _period},
}
"""By model type, the keys that mlx_lm's module needs and transformers leaves out."""
_NULLS: Mapping[str, tuple[str, ...]] = {
    "exaone4": ("rope_scaling", "sliding_window", "sliding_window_pattern"),
    "glm4_moe": ("rope_scaling",),
    "mimo_v2_flash": ("n_shared_experts",),
}
"""Keys that a module needs even if there is no value."""
_RENAMED_LAYERS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "granitemoehybrid": {"layer_types": {"linear_attention": "mamba", _FULL: "attention"}}
}
"""By model type and key: types of layers that transformers 5 has renamed, with the names that mlx_lm reads."""
