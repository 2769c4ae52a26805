"""Conversion of hyperparameters between ``config.json`` and GGUF metadata."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.tensor import Array
from ingot.translate import dense_layers, pooling, rotary, settings
from ingot.translate.config_numbers import (
    config_number,
    head_size,
    heads,
    integer,
    is_number,
    nested_value,
    number_error,
    same_value,
    set_nested,
    shorten,
)
from ingot.translate.families import UNSUPPORTED, Family
from ingot.translate.formulas import evaluate
from ingot.translate.keys import Typed

# Key of config.json, GGUF key without the architecture's name, type.
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
_ARCHITECTURE_KEYS = {
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
    "sliding_window": (),
}
"""Keys that llama.cpp reads only for the listed architectures; ``settings`` handles the key of sliding windows.
"""
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_ROPE_KEYS = ("rope_theta", "original_max_position_embeddings")
_Q_RANK = "q_lora_rank"
_LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GROUPS = ("n_group", "topk_group")
_LAYER_COUNT = "num_hidden_layers"
_METHOD = "topk_method"
_GREEDY = "greedy"
_IN_GROUPS = "group_limited_greedy"
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_ROBERTA_PADDING = 1
_MAX_PADDING = 1 << 12
_ID_KEY = "tokenizer.ggml.{}_token_id"


def to_metadata(
    config: Mapping[str, Any], family: Family, names: Collection[str], *, parted: bool = True
) -> tuple[Typed, list[str]]:
    """Return GGUF metadata with their types, and descriptions of hyperparameters that llama.cpp does not compute.

    Parameters
    ----------
    config : mapping
    family : Family
    names : collection of str
        Transformers' names of the tensors.
    parted : bool
        Whether keys and values of a latent vector have separate matrices.

    Raises
    ------
    UnsupportedError
        ``architecture.config``: a required number is missing or invalid, or attention is bidirectional, which is
        another architecture.
    """
    for key in family.required:
        integer(config, key)
    settings.require_computed(config, family)
    _require_one_direction(config, family)
    dense_layers.require_count(config, family, names)
    metadata: Typed = {"general.architecture": ("string", family.arch), "general.type": ("string", "model")}
    config = _with_usual_keys(config, family)
    if family.experts:
        integer(config, family.expert_count)
    carried = set()
    for name, (key, gguf_type) in _keys(family).items():
        if (value := nested_value(config, key)) is not None:
            metadata[name] = (gguf_type, config_number({key: value}, key, gguf_type))
            carried |= {key} if family.arch in _ARCHITECTURE_KEYS.get(key, (family.arch,)) else set()
    metadata |= {_full_key(name, family): typed for name, typed in family.fixed.items()}
    if not any(f"{family.arch}.{name}" in metadata for name in _EPSILONS):
        raise number_error("rms_norm_eps", "a number", None)
    metadata |= _computed_metadata(config, family, metadata)
    if family.window_pattern:
        windows, key = settings.window_metadata(config, family)
        metadata |= windows
        carried |= {key}
    carried |= {
        key for text in family.computed.values() for key in re.split(r"[+*/ ]", text) if key and not key.isdigit()
    }
    if family.padded:
        positions = integer(config, "max_position_embeddings") - positions_before_tokens(config)
        length = integer({"max_position_embeddings": positions}, "max_position_embeddings")
        metadata[f"{family.arch}.context_length"] = ("u32", length)
    if config.get("is_causal") is False:
        metadata[f"{family.arch}.attention.causal"] = ("bool", False)
    if family.latent and config.get(_Q_RANK) is None:
        metadata[f"{family.arch}.attention.{_Q_RANK}"] = ("u32", 0)  # llama.cpp requires the key; 0 means no low rank
    sizes = _latent_sizes(config, parted=parted) if family.latent else _head_sizes(config, family)
    metadata |= {f"{family.arch}.{name}": ("u32", size) for name, size in sizes.items() if name not in family.computed}
    rotary_metadata, dropped = ({}, list[str]()) if family.rope is None else rotary.to_metadata(config, family)
    metadata |= rotary_metadata
    carried |= set(_LATENT) if family.latent else set()
    return metadata, [*dropped, *settings.unsupported(config, family, carried, names)]


def _computed_metadata(config: Mapping[str, Any], family: Family, written: Collection[str]) -> Typed:
    """Return metadata whose values are formulas of several keys, and arrays with a value per layer.

    A formula is not evaluated for a key that is already ``written``.
    """
    arch = family.arch
    metadata: Typed = {
        f"{arch}.{name}": ("u32", evaluate(text, config))
        for name, text in family.computed.items()
        if f"{arch}.{name}" not in written
    }
    for name, formulas in family.by_layer.items():
        types = settings.layer_types(config)
        unknown = next((layer for layer in types if layer not in formulas), None)
        if unknown is not None or not types:
            raise UnsupportedError(
                f"expected a list of layer types ({', '.join(formulas)}), found {str(unknown or types)[:80]!r}",
                rule="architecture.config",
            )
        metadata[f"{arch}.{name}"] = ("array:u32", [evaluate(formulas[layer], config) for layer in types])
    return metadata


def _require_one_direction(config: Mapping[str, Any], family: Family) -> None:
    """Raise an error for Gemma with bidirectional attention, which is a separate architecture in llama.cpp."""
    if config.get("use_bidirectional_attention") is True:
        raise UnsupportedError(
            f"{family.model_type} with use_bidirectional_attention is another architecture of llama.cpp "
            "(gemma-embedding), which Ingot does not translate; --keep-names leaves the tensors as they are",
            rule=UNSUPPORTED,
        )


def positions_before_tokens(config: Mapping[str, Any]) -> int:
    """Return the number of position embeddings up to the padding token's id; no token uses them.

    Raises ``UnsupportedError`` ``architecture.config``: the id is out of range.
    """
    padding = config.get("pad_token_id")
    if padding is None:
        return 1 + _ROBERTA_PADDING
    if type(padding) is not int or not 0 <= padding < _MAX_PADDING:
        raise number_error(
            "pad_token_id", f"a number from 0 to {_MAX_PADDING - 1}, after which positions begin", padding
        )
    return 1 + padding


def _full_key(name: str, family: Family) -> str:
    return name if name.startswith("tokenizer.") else f"{family.arch}.{name}"


def _keys(family: Family) -> dict[str, tuple[str, str]]:
    """Return the key of ``config.json`` and the value's type for each GGUF key."""
    experts = ((family.expert_count, "expert_count", "u32"),) if family.experts else ()
    return {_full_key(name, family): (key, gguf_type) for key, name, gguf_type in (*_KEYS, *experts, *family.keys)}


def read_keys(family: Family) -> frozenset[str]:
    """Return the GGUF keys that a conversion to a folder reads, and keys that a conversion to GGUF computes again."""
    heads = [*_HEAD, *(f"{name}_mla" for name in _HEAD[:2])]
    windows = [settings.PATTERN] if family.window_pattern else []
    repeated = [
        *windows,
        "attention.causal",
        pooling.KEY,
        pooling.LABELS,
        "rope.scaling.finetuned",
        *rotary.READ,
        *heads,
    ]
    return frozenset(
        (
            *_keys(family),
            *(key for key, _ in family.scalars.values()),
            *(
                f"{family.arch}.{name}"
                for name in (*repeated, *family.fixed, *family.computed, *family.by_layer, *family.rows)
            ),
        )
    )


def _with_usual_keys(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config with usual key names, and without the keys of expert groups if the routing ignores groups."""
    result = usual_keys(config, family)
    alternative_key = next((key for key in _EXPERT_COUNTS if config.get(key) is not None), None)
    if family.experts and alternative_key is not None and config.get(family.expert_count) is None:
        result[family.expert_count] = config[alternative_key]
    if config.get(_METHOD) == _GREEDY:
        result |= dict.fromkeys(_GROUPS)
    return result


def usual_keys(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config with the family's key names replaced by the usual ones."""
    family_names = set(family.aliases.values()) - set(family.aliases)
    result = {key: value for key, value in config.items() if key not in family_names}
    types = settings.layer_types(config)
    if types and config.get(_LAYER_COUNT) is None and _LAYER_COUNT not in family.aliases:
        result[_LAYER_COUNT] = len(types)
    result |= {usual: config[key] for usual, key in family.aliases.items() if config.get(key) is not None}
    return dense_layers.with_count(result, family)


def family_keys(config: Mapping[str, Any], family: Family, original: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``usual_keys``, except for usual names that the ``original`` config uses."""
    usual = {key for key, name in family.aliases.items() if key in original and name not in original}
    renamed = {key if key in usual else family.aliases.get(key, key): value for key, value in config.items()}
    return dense_layers.without_implied_count(renamed, family, original)


def _head_sizes(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    if family.rope is None:
        return {}
    size = head_size(config)
    return dict(zip(_HEAD, (size, size, rotary.rotated_size(config) if family.partial else size), strict=True))


def _latent_sizes(config: Mapping[str, Any], *, parted: bool) -> dict[str, int]:
    """Return llama.cpp's sizes of keys and values that come from a latent vector.

    If keys and values have separate matrices, llama.cpp computes them as one head of the latent vector's size. GGUF
    keys with ``_mla`` then contain the real sizes. If they share a matrix, the sizes are the real ones.
    """
    rope, plain, value, rank = (integer(config, key) for key in _LATENT)
    sizes = {_HEAD[2]: rope}
    if not parted:
        return {**sizes, _HEAD[0]: plain + rope, _HEAD[1]: value}
    real_sizes = {"attention.key_length_mla": plain + rope, "attention.value_length_mla": value}
    return {**sizes, "attention.head_count_kv": 1, _HEAD[0]: rank + rope, _HEAD[1]: rank, **real_sizes}


def to_config(
    metadata: Mapping[str, Any], family: Family, names: Collection[str], factors: Mapping[str, Array]
) -> dict[str, Any]:
    """Return the ``config.json`` that describes a GGUF file.

    Parameters
    ----------
    metadata : mapping
        The file's metadata.
    family : Family
    names : collection of str
        Transformers' names of the file's tensors.
    factors : mapping
        Values of the rotary embedding's tensors (``rotary.TENSORS``).
    """
    arch = family.arch
    config: dict[str, Any] = {"architectures": [family.model_class], "model_type": family.model_type, **family.defaults}
    config |= _values_by_key(metadata, family) | settings.window_config(metadata, family)
    if family.latent:
        config |= _latent_config(metadata, family, config)
        config[_Q_RANK] = config.get(_Q_RANK) or None
    elif is_number(metadata.get(f"{arch}.{_HEAD[0]}")) and _HEAD[0] not in family.computed:
        config["head_dim"] = metadata[f"{arch}.{_HEAD[0]}"]
    if family.scalar and "head_dim" in config:
        config["query_pre_attn_scalar"] = settings.attention_scalar(config, family)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    if family.rope is not None:
        config |= rotary.to_config(metadata, family, factors, config)
    _drop_computed(config, metadata, family)
    for key in [key for key in config if "." in key]:
        set_nested(config, key, config.pop(key))
    config |= _special_settings(metadata, family)
    if family.padded and "max_position_embeddings" in config:
        config["max_position_embeddings"] += positions_before_tokens(config)
    config["tie_word_embeddings"] = not any(name.endswith(settings.HEADS) for name in names)
    if any(name.endswith("self_attn.q_proj.bias") for name in names) or family.model_type == "llama":
        config["attention_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in names)
    if family.model_type == "llama":
        config["mlp_bias"] = any(name.endswith("mlp.down_proj.bias") for name in names)
    return config


def _values_by_key(metadata: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the values of GGUF keys that correspond to exactly one key of ``config.json``."""
    implied = {f"{family.arch}.{name}" for name in (*family.fixed, *family.by_layer, *family.rows)}
    values: dict[str, Any] = {}
    for name, (key, gguf_type) in _keys(family).items():
        value = metadata.get(name)
        if name not in implied and (is_number(value) if gguf_type != "bool" else isinstance(value, bool)):
            values[key] = shorten(value) if gguf_type == "f32" else value
    return values


def _drop_computed(config: dict[str, Any], metadata: Mapping[str, Any], family: Family) -> None:
    """Remove each key of the config whose value follows from the other keys by a formula of the family."""
    keys = _keys(family)
    for name, formula in family.computed.items():
        full_name = f"{family.arch}.{name}"
        key = keys.get(full_name, ("", ""))[0]
        without_key = {name: value for name, value in config.items() if name != key}
        if key in config and _evaluates_to(formula, without_key, metadata.get(full_name)):
            del config[key]


def _evaluates_to(formula: str, config: Mapping[str, Any], value: Any) -> bool:
    try:
        return bool(evaluate(formula, config) == value)
    except UnsupportedError:
        return False


def _special_settings(metadata: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return ids of special tokens, labels of a classifier, and whether attention is causal."""
    ids = {key: metadata.get(_ID_KEY.format(name)) for key, name in _IDS.items()}
    result = {key: value for key, value in ids.items() if is_number(value)}
    if family.rope is not None and metadata.get(f"{family.arch}.attention.causal") is False:
        result["is_causal"] = False
    labels = metadata.get(f"{family.arch}.{pooling.LABELS}")
    if isinstance(labels, list):
        result["id2label"] = {str(index): str(label) for index, label in enumerate(labels)}
        result["architectures"] = [f"{family.model_class.removesuffix('Model')}ForSequenceClassification"]
    return result


def _has_separate_matrices(metadata: Mapping[str, Any], family: Family) -> bool:
    """Return whether keys and values of a latent vector have separate matrices."""
    return is_number(metadata.get(f"{family.arch}.attention.key_length_mla"))


def latent_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of heads, the size of a key without its rotary part, and the size of a value.

    Raises ``UnsupportedError`` ``architecture.config``.
    """
    return heads(config)[0], integer(config, _LATENT[1]), integer(config, _LATENT[2])


def _latent_config(metadata: Mapping[str, Any], family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    suffix = "_mla" if _has_separate_matrices(metadata, family) else ""
    key, value = (integer(metadata, f"{family.arch}.{name}{suffix}") for name in _HEAD[:2])
    rope = integer(metadata, f"{family.arch}.{_HEAD[2]}")
    if key <= rope:
        raise number_error("attention.key_length", f"more than the {rope} of rope.dimension_count", key)
    sizes = dict(zip(_LATENT, (rope, key - rope, value), strict=False))
    method = (
        {} if _METHOD not in family.defaults else {_METHOD: _IN_GROUPS if config.get(_GROUPS[0], 1) > 1 else _GREEDY}
    )
    return {**sizes, **method, "num_key_value_heads": integer(config, "num_attention_heads")}


def _completed(read: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``read`` with entries of nested objects added from ``original``, if GGUF has no key for them."""
    return {
        key: {**before, **value}
        if isinstance(before := original.get(key), Mapping) and isinstance(value, Mapping) and key != "rope_parameters"
        else value
        for key, value in read.items()
    }


def merge_configs(
    original: Mapping[str, Any], read: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], list[str]]:
    """Return the original ``config.json`` updated with ``read``, and the keys that changed.

    ``read`` is a result of ``to_config``. Rotary parameters have two spellings: if the numbers are equal, the original
    spelling stays.
    """
    result = dict(original)
    changed = list[str]()
    granted = {*family.defaults, *(["query_pre_attn_scalar"] if family.scalar else [])}
    granted -= {key for key, _ in _keys(family).values()}
    same_rope = rotary.has_same_rotary(usual_keys(original, family), usual_keys(read, family))
    rope_keys = {"rope_parameters", *(family.aliases.get(key, key) for key in _ROPE_KEYS), *_ROPE_KEYS}
    for key, value in _completed(read, original).items():
        if key in rope_keys and same_rope:
            continue
        if key in ("architectures", "model_type", *granted) and original.get("model_type") is not None:
            continue
        before = original.get(key)
        if isinstance(before, list) and value in before:
            continue
        if key == family.expert_count and same_value(_with_usual_keys(original, family).get(key), value):
            continue
        if key == settings.LAYERS and settings.has_same_windows(original, read):
            continue
        if key == _LAYER_COUNT and key not in original and value == len(settings.layer_types(original)):
            continue
        if key not in original and key in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", *_IDS):
            continue
        if not same_value(before, value):
            result[key] = value
            changed.append(key)
    if "rope_parameters" in changed:
        result.pop("rope_scaling", None)  # the older key, which takes precedence
    return result, changed
