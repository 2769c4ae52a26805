"""Hyperparameters: ``config.json`` to GGUF metadata and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError
from ingot.model.tensor import Array
from ingot.ops.architectures.families import Family

RULE = "architecture.config"
Typed = dict[str, tuple[str, Any]]

# Key of config.json, GGUF key behind the architecture's name, type.
_KEYS = (
    ("num_hidden_layers", "block_count", "u32"),
    ("max_position_embeddings", "context_length", "u32"),
    ("hidden_size", "embedding_length", "u32"),
    ("intermediate_size", "feed_forward_length", "u32"),
    ("num_attention_heads", "attention.head_count", "u32"),
    ("num_key_value_heads", "attention.head_count_kv", "u32"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", "f32"),
    ("norm_epsilon", "attention.layer_norm_epsilon", "f32"),
    ("vocab_size", "vocab_size", "u32"),
    ("sliding_window", "attention.sliding_window", "u32"),
    ("num_experts_per_tok", "expert_used_count", "u32"),
    ("moe_intermediate_size", "expert_feed_forward_length", "u32"),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", "u32"),
    ("attn_logit_softcapping", "attn_logit_softcapping", "f32"),
    ("final_logit_softcapping", "final_logit_softcapping", "f32"),
)
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads")
_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_THETA, _SCALING, _FACTOR, _ORIGINAL = (
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_ID_KEY = "tokenizer.ggml.{}_token_id"
_LARGEST_HEAD = 1 << 16
_SCALINGS = {"linear": "linear", "yarn": "yarn"}
"""Of transformers, llama.cpp."""


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of heads and of key-value heads; raises ``UnsupportedError`` ``architecture.config``."""
    count = _integer(config, "num_attention_heads")
    return count, _integer(config, "num_key_value_heads", count)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters, wherever this version of transformers has put them."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(stated) if isinstance(stated, Mapping) else {}
    if "rope_theta" in config:
        found.setdefault("rope_theta", config["rope_theta"])
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def to_metadata(config: Mapping[str, Any], family: Family) -> tuple[Typed, list[str]]:
    """Return GGUF metadata with their types, and what of the hyperparameters llama.cpp has no key for.

    Raises ``UnsupportedError`` ``architecture.config``: a number that every model has is missing or none.
    """
    for key in _NEEDED:
        _integer(config, key)
    found: Typed = {"general.architecture": ("string", family.arch), "general.type": ("string", "model")}
    keys = (*_KEYS, (family.expert_count, "expert_count", "u32")) if family.experts else _KEYS
    for key, name, kind in keys:
        value = config.get(key)
        if value is not None:
            found[f"{family.arch}.{name}"] = (kind, _number(config, key, kind))
    size = config.get("head_dim") or _integer(config, "hidden_size") // heads(config)[0]
    size = _integer({"head_dim": size}, "head_dim")
    share = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    for name in _HEAD[:2]:
        found[f"{family.arch}.{name}"] = ("u32", size)
    found[f"{family.arch}.{_HEAD[2]}"] = (
        "u32",
        int(size * share) if isinstance(share, float) and 0 < share <= 1 else size,
    )
    lost = _rope_to(config, family, found)
    for key, name in _IDS.items():
        value = config.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and not isinstance(first, bool) and 0 <= first < 2**32:
            found[_ID_KEY.format(name)] = ("u32", first)
    return found, lost


def _rope_to(config: Mapping[str, Any], family: Family, found: Typed) -> list[str]:
    rope = rope_of(config)
    theta = rope.get("rope_theta")
    if isinstance(theta, int | float):
        found[f"{family.arch}.{_THETA}"] = ("f32", float(theta))
    kind = rope["rope_type"]
    if kind == "default" or rope_factors(config, family) is not None:
        return []
    if kind not in _SCALINGS or not isinstance(rope.get("factor"), int | float):
        return [f"rope_type {str(kind)[:40]}"]
    found[f"{family.arch}.{_SCALING}"] = ("string", _SCALINGS[kind])
    found[f"{family.arch}.{_FACTOR}"] = ("f32", float(rope["factor"]))
    if isinstance(rope.get("original_max_position_embeddings"), int):
        found[f"{family.arch}.{_ORIGINAL}"] = ("u32", rope["original_max_position_embeddings"])
    return []


def rope_factors(config: Mapping[str, Any], family: Family) -> Array | None:
    """Return what Llama 3.1's scaling divides each frequency of the rotary embedding by; None for another scaling.

    llama.cpp has them as a tensor. Waves longer than ``original_max_position_embeddings / low_freq_factor`` are
    stretched by ``factor``, those shorter than by ``high_freq_factor`` stay, between them goes smoothly (transformers,
    ``modeling_rope_utils.py``). f32 [head size / 2].
    """
    rope = rope_of(config)
    keys = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if rope["rope_type"] != "llama3" or family.arch != "llama":
        return None
    numbers: list[Any] = [rope.get(key) for key in keys]
    if not all(_is_number(value) and 0 < value < 2**53 for value in numbers) or numbers[2] == numbers[3]:
        return None
    theta, factor, low, high, length = map(float, numbers)
    size = int(config.get("head_dim") or _integer(config, "hidden_size") // heads(config)[0])
    if not 0 < size <= _LARGEST_HEAD:
        return None
    wave = 2 * np.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length / wave - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def to_config(metadata: Mapping[str, Any], family: Family, names: Collection[str]) -> dict[str, Any]:
    """Return ``config.json`` of a GGUF file's metadata and of transformers' names of its tensors."""
    arch = family.arch
    found: dict[str, Any] = {"architectures": [family.model_class], "model_type": family.model_type, **family.defaults}
    keys = (*_KEYS, (family.expert_count, "expert_count", "u32")) if family.experts else _KEYS
    for key, name, kind in keys:
        value = metadata.get(f"{arch}.{name}")
        if _is_number(value):
            found[key] = _short(value) if kind == "f32" else value
    if _is_number(metadata.get(f"{arch}.{_HEAD[0]}")):
        found["head_dim"] = metadata[f"{arch}.{_HEAD[0]}"]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in found and isinstance(tokens, list):
        found["vocab_size"] = len(tokens)
    theta = metadata.get(f"{arch}.{_THETA}")
    rope: dict[str, Any] = {"rope_type": "default"}
    if _is_number(theta):
        rope["rope_theta"] = found["rope_theta"] = _short(theta)
    scaling = next((key for key, name in _SCALINGS.items() if name == metadata.get(f"{arch}.{_SCALING}")), None)
    if scaling is not None:
        rope |= {"rope_type": scaling, "factor": _short(metadata.get(f"{arch}.{_FACTOR}", 1.0))}
        if f"{arch}.{_ORIGINAL}" in metadata:
            rope["original_max_position_embeddings"] = metadata[f"{arch}.{_ORIGINAL}"]
    found["rope_parameters"] = rope
    for key, name in _IDS.items():
        value = metadata.get(_ID_KEY.format(name))
        if _is_number(value):
            found[key] = value
    found["tie_word_embeddings"] = "lm_head.weight" not in names
    if family.model_type == "llama":
        found["attention_bias"] = any(name.endswith("self_attn.o_proj.bias") for name in names)
        found["mlp_bias"] = any(name.endswith("mlp.down_proj.bias") for name in names)
    return found


def merged(stated: Mapping[str, Any], read: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the ``config.json`` that a file was made with, true of what the file says now, and the keys that changed.

    The rotary embedding is stated in one of two ways; where its numbers are the same, it stays as it is.
    """
    found, changed = dict(stated), []
    rope, read_rope = rope_of(stated), rope_of(read)
    same_rope = all(_same(rope.get(key), value) for key, value in read_rope.items())
    for key, value in read.items():
        if key in ("rope_theta", "rope_parameters") and (same_rope or rope["rope_type"] not in ("default", *_SCALINGS)):
            continue
        if key in ("architectures", "model_type", "hidden_act") and stated.get("model_type") is not None:
            continue
        before = stated.get(key)
        if isinstance(before, list) and value in before:
            continue
        if key not in stated and key in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", *_IDS):
            continue
        if not _same(before, value):
            found[key] = value
            changed.append(key)
    return found, changed


def _is_number(value: Any) -> bool:
    """Whether this is one number, and not one for each layer."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int) and not isinstance(one, bool):
        return one == other or abs(one - other) <= 1e-6 * abs(one)
    return bool(one == other)


def _short(value: Any) -> Any:
    """Return the shortest number that is the same in f32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < 2**32:
        raise _wrong(key, "a whole number above 0", value)
    return value


def _number(config: Mapping[str, Any], key: str, kind: str) -> int | float:
    value = config[key]
    if kind == "u32":
        if type(value) is not int or not 0 <= value < 2**32:
            raise _wrong(key, "a whole number", value)
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(key, "a number", value)
    return float(value)


def _wrong(key: str, expected: str, found: object) -> UnsupportedError:
    return UnsupportedError(
        f"expected {expected} as {key} in config.json, found {found!r:.80}; --keep-names converts without it", rule=RULE
    )
