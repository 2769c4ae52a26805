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
_THETA, _THETA_SLIDING, _SCALING, _FACTOR, _ORIGINAL, _LOG = (
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_log_multiplier",
)
_BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
_MSCALE = ("mscale", "mscale_all_dim")
_LOG_UNIT = 0.1  # llama.cpp has mscale_all_dim times the factor of YaRN's logarithm
_LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GROUPS, _METHOD, _GREEDY, _IN_GROUPS = ("n_group", "topk_group"), "topk_method", "greedy", "group_limited_greedy"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_ID_KEY = "tokenizer.ggml.{}_token_id"
_LARGEST_HEAD = 1 << 16
_SCALINGS = {"linear": "linear", "yarn": "yarn"}
"""Of transformers, llama.cpp."""


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of heads and of key-value heads; raises ``UnsupportedError`` ``architecture.config``."""
    count = _integer(config, "num_attention_heads")
    return count, _integer(config, "num_key_value_heads", count)


def head_size(config: Mapping[str, Any]) -> int:
    """Return the numbers that a head has, stated or an equal share of all; errors as ``heads``."""
    size = config.get("head_dim") or _integer(config, "hidden_size") // heads(config)[0]
    return _integer({"head_dim": size}, "head_dim")


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters, wherever this version of transformers has put them.

    Where layers have different ones, those of layers that see all tokens.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(stated) if isinstance(stated, Mapping) else {}
    if isinstance(found.get(_FULL), Mapping):
        found = dict(found[_FULL])
    if "rope_theta" in config:
        found.setdefault("rope_theta", config["rope_theta"])
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def to_metadata(config: Mapping[str, Any], family: Family, *, parted: bool = True) -> tuple[Typed, list[str]]:
    """Return GGUF metadata with their types, and what of the hyperparameters llama.cpp has no key for.

    ``parted``: keys and values of a latent vector have matrices of their own. Raises ``UnsupportedError``
    ``architecture.config``: a number that every model has is missing or none.
    """
    for key in _NEEDED:
        _integer(config, key)
    found: Typed = {"general.architecture": ("string", family.arch), "general.type": ("string", "model")}
    config = _as_spelled(config, family)
    if family.experts:
        _integer(config, family.expert_count)
    for name, (key, kind) in _keys(family).items():
        if config.get(key) is not None:
            found[name] = (kind, _number(config, key, kind))
    found |= {f"{family.arch}.{name}": (kind, value) for name, (kind, value) in family.stated.items()}
    sizes = _latent_sizes(config, parted=parted) if family.latent else _head_sizes(config, family)
    found |= {f"{family.arch}.{name}": ("u32", size) for name, size in sizes.items()}
    lost = [] if family.rope is None else _rope_to(config, family, found)
    for key, name in _IDS.items():
        value = config.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and not isinstance(first, bool) and 0 <= first < 2**32:
            found[_ID_KEY.format(name)] = ("u32", first)
    return found, [*lost, *_taken_otherwise(config, family)]


def _keys(family: Family) -> dict[str, tuple[str, str]]:
    """Return key of ``config.json`` and type by GGUF's key."""
    experts = ((family.expert_count, "expert_count", "u32"),) if family.experts else ()
    return {
        name if name.startswith("tokenizer.") else f"{family.arch}.{name}": (key, kind)
        for key, name, kind in (*_KEYS, *experts, *family.keys)
    }


def _as_spelled(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys as the family's first models have them, and none that are not looked at."""
    found = dict(config)
    other = next((key for key in _EXPERT_COUNTS if config.get(key) is not None), None)
    if family.experts and other is not None and config.get(family.expert_count) is None:
        found[family.expert_count] = config[other]
    if config.get(_METHOD) == _GREEDY:
        found |= dict.fromkeys(_GROUPS)
    return found


def _head_sizes(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    size = head_size(config)
    if family.rope is None:
        return {}
    share = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    turned = int(size * share) if isinstance(share, float) and 0 < share <= 1 else size
    return dict(zip(_HEAD, (size, size, turned), strict=True))


def _latent_sizes(config: Mapping[str, Any], *, parted: bool) -> dict[str, int]:
    """Return what llama.cpp states of keys and values that come from a latent vector.

    With matrices of their own they are computed as one head of the latent vector's size, and ``_mla`` tells the real
    ones; with one matrix for both as they are.
    """
    rope, plain, value, rank = (_integer(config, key) for key in _LATENT)
    sizes = {_HEAD[2]: rope}
    if not parted:
        return {**sizes, _HEAD[0]: plain + rope, _HEAD[1]: value}
    own = {"attention.key_length_mla": plain + rope, "attention.value_length_mla": value}
    return {**sizes, "attention.head_count_kv": 1, _HEAD[0]: rank + rope, _HEAD[1]: rank, **own}


def _taken_otherwise(config: Mapping[str, Any], family: Family) -> list[str]:
    """Return the keys whose values are others than those that llama.cpp takes for granted."""
    granted = {**family.defaults, **{key: config.get(other) for key, other in family.equal.items()}}
    return [
        f"{key} {config[key]!r:.40}, which llama.cpp takes for {value!r:.40}"
        for key, value in granted.items()
        if config.get(key) is not None and value is not None and config[key] != value
    ]


def _rope_to(config: Mapping[str, Any], family: Family, found: Typed) -> list[str]:
    rope = rope_of(config)
    theta, sliding = rope.get("rope_theta"), _sliding_rope(config).get("rope_theta")
    mscale, every = (rope.get(key) for key in _MSCALE)
    found |= _floats(family, {_THETA: theta, _THETA_SLIDING: sliding})
    kind = rope["rope_type"]
    if kind == "default" or rope_factors(config, family) is not None:
        return []
    if kind not in _SCALINGS or not isinstance(rope.get("factor"), int | float):
        return [f"rope_type {str(kind)[:40]}"]
    found[f"{family.arch}.{_SCALING}"] = ("string", _SCALINGS[kind])
    found[f"{family.arch}.{_FACTOR}"] = ("f32", float(rope["factor"]))
    if isinstance(rope.get("original_max_position_embeddings"), int):
        found[f"{family.arch}.{_ORIGINAL}"] = ("u32", rope["original_max_position_embeddings"])
    scaled = _LOG_UNIT * every if isinstance(every, int | float) else None
    found |= _floats(family, {**{name: rope.get(key) for key, name in _BETAS.items()}, _LOG: scaled})
    lost = [
        f"rope_parameters {key}" for key in ("attention_factor", "truncate")
        if rope.get(key) is not None and rope[key] != (family.rope or {}).get(key, key == "truncate")
    ]  # fmt: skip
    return [*lost, "rope_parameters mscale"] if mscale != every else lost


def _floats(family: Family, values: Mapping[str, Any]) -> Typed:
    """Return those of the values that are numbers."""
    numbers = {name: value for name, value in values.items() if _is_number(value)}
    return {f"{family.arch}.{name}": ("f32", float(value)) for name, value in numbers.items()}


def _sliding_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters of layers with a sliding window, where they have their own."""
    stated = config.get("rope_parameters")
    found = stated.get(_SLIDING) if isinstance(stated, Mapping) else None
    local = config.get("rope_local_base_freq")
    if isinstance(found, Mapping):
        return found
    return {"rope_type": "default", "rope_theta": local} if _is_number(local) else {}


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
    size = head_size(config)
    if size > _LARGEST_HEAD:
        return None
    wave = 2 * np.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length / wave - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def to_config(metadata: Mapping[str, Any], family: Family, names: Collection[str]) -> dict[str, Any]:
    """Return ``config.json`` of a GGUF file's metadata and of transformers' names of its tensors."""
    arch = family.arch
    found: dict[str, Any] = {"architectures": [family.model_class], "model_type": family.model_type, **family.defaults}
    for name, (key, kind) in _keys(family).items():
        value = metadata.get(name)
        if _is_number(value) if kind != "bool" else isinstance(value, bool):
            found[key] = _short(value) if kind == "f32" else value
    if family.latent:
        found |= _latent_of(metadata, family, found)
    elif _is_number(metadata.get(f"{arch}.{_HEAD[0]}")):
        found["head_dim"] = metadata[f"{arch}.{_HEAD[0]}"]
    found |= {key: found[other] for key, other in family.equal.items() if other in found}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in found and isinstance(tokens, list):
        found["vocab_size"] = len(tokens)
    if family.rope is not None:
        found |= _rope_from(metadata, family)
    for key, name in _IDS.items():
        value = metadata.get(_ID_KEY.format(name))
        if _is_number(value):
            found[key] = value
    found["tie_word_embeddings"] = "lm_head.weight" not in names
    if family.model_type == "llama":
        found["attention_bias"] = any(name.endswith("self_attn.o_proj.bias") for name in names)
        found["mlp_bias"] = any(name.endswith("mlp.down_proj.bias") for name in names)
    return found


def _is_parted(metadata: Mapping[str, Any], family: Family) -> bool:
    """Whether keys and values of a latent vector have matrices of their own."""
    return _is_number(metadata.get(f"{family.arch}.attention.key_length_mla"))


def latent_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the heads, and the sizes of a key less its rotary part and of a value; errors as ``heads``."""
    return heads(config)[0], _integer(config, _LATENT[1]), _integer(config, _LATENT[2])


def _latent_of(metadata: Mapping[str, Any], family: Family, found: Mapping[str, Any]) -> dict[str, Any]:
    own = "_mla" if _is_parted(metadata, family) else ""
    key, value = (_integer(metadata, f"{family.arch}.{name}{own}") for name in _HEAD[:2])
    rope = _integer(metadata, f"{family.arch}.{_HEAD[2]}")
    if key <= rope:
        raise _wrong("attention.key_length", f"more than the {rope} of rope.dimension_count", key)
    sizes = dict(zip(_LATENT, (rope, key - rope, value), strict=False))
    method = (
        {} if _METHOD not in family.defaults else {_METHOD: _IN_GROUPS if found.get(_GROUPS[0], 1) > 1 else _GREEDY}
    )
    return {**sizes, **method, "num_key_value_heads": _integer(found, "num_attention_heads")}


def _rope_from(metadata: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys of ``config.json`` that tell of the rotary embedding."""

    def said(name: str) -> Any:
        return metadata.get(f"{family.arch}.{name}")

    theta, rope, found = said(_THETA), dict[str, Any](rope_type="default"), dict[str, Any]()
    if _is_number(theta):
        rope["rope_theta"] = found["rope_theta"] = _short(theta)
    scaling = next((key for key, name in _SCALINGS.items() if name == said(_SCALING)), None)
    if scaling is not None:
        rope |= {"rope_type": scaling, "factor": _short(said(_FACTOR) or 1.0), **(family.rope or {})}
        if said(_ORIGINAL) is not None:
            rope["original_max_position_embeddings"] = said(_ORIGINAL)
        rope |= {key: _short(said(name)) for key, name in _BETAS.items() if _is_number(said(name))}
        if _is_number(said(_LOG)):
            rope |= dict.fromkeys(_MSCALE, float(f"{said(_LOG) / _LOG_UNIT:.6g}"))
    if family.rope_by_layer:
        local = {"rope_type": "default", "rope_theta": _short(said(_THETA_SLIDING) or 10000.0)}
        return {"rope_parameters": {_FULL: rope, _SLIDING: local}}
    return {**found, "rope_parameters": rope}


def merged(stated: Mapping[str, Any], read: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the ``config.json`` that a file was made with, true of what the file says now, and the keys that changed.

    The rotary embedding is stated in one of two ways; where its numbers are the same, it stays as it is.
    """
    found, changed = dict(stated), list[str]()
    granted = {*family.defaults, *family.equal} - {key for key, _ in _keys(family).values()}
    rope, read_rope = rope_of(stated), rope_of(read)
    local, read_local = _sliding_rope(stated), _sliding_rope(read)
    same_rope = all(_same(rope.get(key), value) for key, value in read_rope.items()) and all(
        _same(local.get(key), value) for key, value in read_local.items()
    )
    for key, value in read.items():
        if key in ("rope_theta", "rope_parameters") and (same_rope or rope["rope_type"] not in ("default", *_SCALINGS)):
            continue
        if key in ("architectures", "model_type", *granted) and stated.get("model_type") is not None:
            continue
        before = stated.get(key)
        if isinstance(before, list) and value in before:
            continue
        if key == family.expert_count and _same(_as_spelled(stated, family).get(key), value):
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
    if kind == "bool":
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value
    if kind == "u32":
        if type(value) is not int or not 0 <= value < 2**32:
            raise _wrong(key, "a whole number", value)
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(key, "a number", value)
    return float(value)


def _wrong(key: str, expected: str, found: object) -> UnsupportedError:
    return UnsupportedError(
        f"expected {expected} as the model's {key}, found {found!r:.80}; correct config.json, or convert to or from "
        "GGUF with --keep-names, which does without it",
        rule=RULE,
    )
