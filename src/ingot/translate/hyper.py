"""Hyperparameters: ``config.json`` to GGUF metadata and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.tensor import Array
from ingot.translate import pooling, rotary, settings
from ingot.translate.families import Family
from ingot.translate.keys import Typed
from ingot.translate.numbers import head_size, heads, integer, is_number, number, same, short, wrong

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
_OF_SOME = {
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
    "sliding_window": (),
}
"""Keys that llama.cpp reads for some architectures alone; ``settings`` states what becomes of the sliding window."""
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_EPSILONS = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps")
_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_Q_RANK = "q_lora_rank"
_LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GROUPS = ("n_group", "topk_group")
_METHOD = "topk_method"
_GREEDY = "greedy"
_IN_GROUPS = "group_limited_greedy"
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_ROBERTA_PADDING = 1
_MOST_PADDING = 1 << 12
_ID_KEY = "tokenizer.ggml.{}_token_id"


def to_metadata(
    config: Mapping[str, Any], family: Family, names: Collection[str], *, parted: bool = True
) -> tuple[Typed, list[str]]:
    """Return GGUF metadata with their types, and what of the hyperparameters llama.cpp does not compute.

    Parameters
    ----------
    config : mapping
    family : Family
    names : collection of str
        Transformers' names of the tensors.
    parted : bool
        Keys and values of a latent vector have matrices of their own.

    Raises
    ------
    UnsupportedError
        ``architecture.config``: a number that every model has is missing or none; attention in both directions, which
        is another architecture.
    """
    for key in _NEEDED:
        integer(config, key)
    if not any(is_number(config.get(key)) for key in _EPSILONS):
        raise wrong(_EPSILONS[0], "a number", None)
    _require_one_direction(config, family)
    found: Typed = {"general.architecture": ("string", family.arch), "general.type": ("string", "model")}
    config = _as_spelled(config, family)
    if family.experts:
        integer(config, family.expert_count)
    carried = set()
    for name, (key, kind) in _keys(family).items():
        if config.get(key) is not None:
            found[name] = (kind, number(config, key, kind))
            carried |= {key} if family.arch in _OF_SOME.get(key, (family.arch,)) else set()
    if family.padded:
        positions = integer(config, "max_position_embeddings") - positions_before(config)
        length = integer({"max_position_embeddings": positions}, "max_position_embeddings")
        found[f"{family.arch}.context_length"] = ("u32", length)
    if config.get("is_causal") is False:
        found[f"{family.arch}.attention.causal"] = ("bool", False)
    found |= {f"{family.arch}.{name}": (kind, value) for name, (kind, value) in family.stated.items()}
    if family.latent and config.get(_Q_RANK) is None:
        found[f"{family.arch}.attention.{_Q_RANK}"] = ("u32", 0)  # which llama.cpp takes for none, and misses
    sizes = _latent_sizes(config, parted=parted) if family.latent else _head_sizes(config, family)
    found |= {f"{family.arch}.{name}": ("u32", size) for name, size in sizes.items()}
    turning, lost = ({}, list[str]()) if family.rope is None else rotary.to_metadata(config, family)
    found |= turning
    carried |= set(_LATENT) if family.latent else set()
    return found, [*lost, *settings.unsupported(config, family, carried, names)]


def _require_one_direction(config: Mapping[str, Any], family: Family) -> None:
    """Refuse Gemma whose tokens see those after them: an architecture of its own in llama.cpp."""
    if config.get("use_bidirectional_attention") is True:
        raise UnsupportedError(
            f"{family.model_type} with use_bidirectional_attention is another architecture of llama.cpp "
            "(gemma-embedding), which Ingot does not translate; --keep-names leaves the tensors as they are",
            rule="architecture.unknown",
        )


def positions_before(config: Mapping[str, Any]) -> int:
    """Return how many positions no token has: those up to the id of padding; errors as ``numbers.integer``."""
    padding = config.get("pad_token_id")
    if padding is None:
        return 1 + _ROBERTA_PADDING
    if type(padding) is not int or not 0 <= padding < _MOST_PADDING:
        raise wrong(
            "pad_token_id", f"a number from 0 to {_MOST_PADDING - 1}, before which there are no positions", padding
        )
    return 1 + padding


def _keys(family: Family) -> dict[str, tuple[str, str]]:
    """Return key of ``config.json`` and type by GGUF's key."""
    experts = ((family.expert_count, "expert_count", "u32"),) if family.experts else ()
    return {
        name if name.startswith("tokenizer.") else f"{family.arch}.{name}": (key, kind)
        for key, name, kind in (*_KEYS, *experts, *family.keys)
    }


def read_keys(family: Family) -> frozenset[str]:
    """Return the GGUF keys that ``to_config`` and ``pooling`` read, and those that only repeat what others say."""
    heads = [*_HEAD, *(f"{name}_mla" for name in _HEAD[:2])]
    others = ["attention.causal", pooling.KEY, pooling.LABELS, "rope.scaling.finetuned", *rotary.READ, *heads]
    return frozenset((*_keys(family), *(f"{family.arch}.{name}" for name in (*others, *family.stated))))


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
    if family.rope is None:
        return {}
    size = head_size(config)
    return dict(zip(_HEAD, (size, size, rotary.turned(config) if family.partial else size), strict=True))


def _latent_sizes(config: Mapping[str, Any], *, parted: bool) -> dict[str, int]:
    """Return what llama.cpp states of keys and values that come from a latent vector.

    With matrices of their own they are computed as one head of the latent vector's size, and ``_mla`` tells the real
    ones; with one matrix for both as they are.
    """
    rope, plain, value, rank = (integer(config, key) for key in _LATENT)
    sizes = {_HEAD[2]: rope}
    if not parted:
        return {**sizes, _HEAD[0]: plain + rope, _HEAD[1]: value}
    own = {"attention.key_length_mla": plain + rope, "attention.value_length_mla": value}
    return {**sizes, "attention.head_count_kv": 1, _HEAD[0]: rank + rope, _HEAD[1]: rank, **own}


def to_config(
    metadata: Mapping[str, Any], family: Family, names: Collection[str], factors: Mapping[str, Array]
) -> dict[str, Any]:
    """Return ``config.json`` of a GGUF file's metadata, of transformers' names of its tensors, and of those that tell
    of the rotary embedding (``rotary.TENSORS``)."""
    arch = family.arch
    found: dict[str, Any] = {"architectures": [family.model_class], "model_type": family.model_type, **family.defaults}
    for name, (key, kind) in _keys(family).items():
        value = metadata.get(name)
        if is_number(value) if kind != "bool" else isinstance(value, bool):
            found[key] = short(value) if kind == "f32" else value
    if family.latent:
        found |= _latent_of(metadata, family, found)
        found[_Q_RANK] = found.get(_Q_RANK) or None
    elif is_number(metadata.get(f"{arch}.{_HEAD[0]}")):
        found["head_dim"] = metadata[f"{arch}.{_HEAD[0]}"]
    if family.scalar and "head_dim" in found:
        found["query_pre_attn_scalar"] = settings.attention_scalar(found, family)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in found and isinstance(tokens, list):
        found["vocab_size"] = len(tokens)
    if family.rope is not None:
        found |= rotary.to_config(metadata, family, factors, found)
    found |= _named(metadata, family)
    if family.padded and "max_position_embeddings" in found:
        found["max_position_embeddings"] += positions_before(found)
    found["tie_word_embeddings"] = "lm_head.weight" not in names
    if any(name.endswith("self_attn.q_proj.bias") for name in names) or family.model_type == "llama":
        found["attention_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in names)
    if family.model_type == "llama":
        found["mlp_bias"] = any(name.endswith("mlp.down_proj.bias") for name in names)
    return found


def _named(metadata: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return ids of special tokens, labels of a classifier, and whether a token sees those after it."""
    ids = {key: metadata.get(_ID_KEY.format(name)) for key, name in _IDS.items()}
    found = {key: value for key, value in ids.items() if is_number(value)}
    if family.rope is not None and metadata.get(f"{family.arch}.attention.causal") is False:
        found["is_causal"] = False
    labels = metadata.get(f"{family.arch}.{pooling.LABELS}")
    if isinstance(labels, list):
        found["id2label"] = {str(number): str(label) for number, label in enumerate(labels)}
        found["architectures"] = [f"{family.model_class.removesuffix('Model')}ForSequenceClassification"]
    return found


def _is_parted(metadata: Mapping[str, Any], family: Family) -> bool:
    """Whether keys and values of a latent vector have matrices of their own."""
    return is_number(metadata.get(f"{family.arch}.attention.key_length_mla"))


def latent_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the heads, and the sizes of a key less its rotary part and of a value; errors as ``heads``."""
    return heads(config)[0], integer(config, _LATENT[1]), integer(config, _LATENT[2])


def _latent_of(metadata: Mapping[str, Any], family: Family, found: Mapping[str, Any]) -> dict[str, Any]:
    own = "_mla" if _is_parted(metadata, family) else ""
    key, value = (integer(metadata, f"{family.arch}.{name}{own}") for name in _HEAD[:2])
    rope = integer(metadata, f"{family.arch}.{_HEAD[2]}")
    if key <= rope:
        raise wrong("attention.key_length", f"more than the {rope} of rope.dimension_count", key)
    sizes = dict(zip(_LATENT, (rope, key - rope, value), strict=False))
    method = (
        {} if _METHOD not in family.defaults else {_METHOD: _IN_GROUPS if found.get(_GROUPS[0], 1) > 1 else _GREEDY}
    )
    return {**sizes, **method, "num_key_value_heads": integer(found, "num_attention_heads")}


def merged(stated: Mapping[str, Any], read: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the ``config.json`` that a file was made with, true of what the file says now, and the keys that changed.

    The rotary embedding is stated in one of two ways; where its numbers are the same, it stays as it is.
    """
    found = dict(stated)
    changed = list[str]()
    granted = {*family.defaults, *(["query_pre_attn_scalar"] if family.scalar else [])}
    granted -= {key for key, _ in _keys(family).values()}
    same_rope = rotary.agrees(stated, read)
    for key, value in read.items():
        if key in ("rope_theta", "rope_parameters", "original_max_position_embeddings") and same_rope:
            continue
        if key in ("architectures", "model_type", *granted) and stated.get("model_type") is not None:
            continue
        before = stated.get(key)
        if isinstance(before, list) and value in before:
            continue
        if key == family.expert_count and same(_as_spelled(stated, family).get(key), value):
            continue
        if key not in stated and key in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", *_IDS):
            continue
        if not same(before, value):
            found[key] = value
            changed.append(key)
    if "rope_parameters" in changed:
        found.pop("rope_scaling", None)  # their older name, which would count
    return found, changed
