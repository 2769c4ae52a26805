"""Reading of ``config.json`` and the other JSON files of a model folder.

Many programs write these files, most of them with Python's ``json``. NaN, infinities, repeated keys (the last value is
used), a byte order mark and -0 are therefore accepted. Manifests of Ingot are read by ``core.parsing.strictjson``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from ingot.errors import FormatError, UnsupportedError, UsageError


@dataclass(frozen=True)
class LlamaConfig:
    """The keys of a Hugging Face ``config.json`` that a Llama's forward pass needs."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    eps: float
    rope_theta: float
    tied_head: bool

    @classmethod
    def from_mapping(cls, config: Mapping[str, object]) -> Self:
        """Return the configuration for the parsed ``config.json``.

        Raises
        ------
        UsageError
            A value is missing or invalid.
        UnsupportedError
            A value requires a feature that Ingot's forward pass does not support.
        """
        for key in ("rope_scaling", "attention_bias", "mlp_bias"):
            if config.get(key):
                raise UnsupportedError(f"config {key}={config[key]!r} is not supported by Ingot's Llama")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedError(f"config hidden_act={config['hidden_act']!r} is not supported by Ingot's Llama")
        heads = _count(config, "num_attention_heads")
        hidden = _count(config, "hidden_size")
        kv_heads = _count(config, "num_key_value_heads", heads)
        head_dim = _count(config, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise UsageError(f"config has {heads} heads, {kv_heads} key heads, head_dim {head_dim}")
        return cls(
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            layers=_count(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_count(config, "vocab_size"),
            context=_count(config, "max_position_embeddings"),
            eps=_positive(config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(config),
            tied_head=bool(config.get("tie_word_embeddings", False)),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, keyed by its name."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.layers):
            for name, shape in layer.items():
                shapes[f"model.layers.{index}.{name}.weight"] = shape
        return shapes


def _rope_theta(config: Mapping[str, object]) -> float:
    """Return the base of the rotary positions (theta): from ``rope_parameters``, or at the top level before
    transformers 5.
    """
    rope = config.get("rope_parameters")
    if rope is None:
        return _positive(config, "rope_theta", 10000.0)
    if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default":
        raise UnsupportedError(f"config rope_parameters={rope!r} is not supported by Ingot's Llama")
    return _positive(rope, "rope_theta", 10000.0)


def _count(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    """Return a positive integer; a missing or null value means ``default``."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise UsageError(f"config {key} must be a positive integer, not {value!r}")
    return value


def _positive(config: Mapping[str, object], key: str, default: float) -> float:
    """Return a positive finite number; a missing or null value means ``default``."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, int | float) and value is not True and 0 < value <= float(np.finfo(np.float32).max):
        return float(value)
    raise UsageError(f"config {key} must be a positive number in the range of float32, not {value!r}")


CONFIG = "config.json"
MAX_CONFIG = 16 << 20
"""The maximum size of a JSON file of a model folder, in bytes."""


def parse_config(data: bytes, rule: str, location: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises ``FormatError`` with ``rule`` if ``data`` has more than ``MAX_CONFIG`` bytes, or is not a JSON object.
    """
    if len(data) > MAX_CONFIG:
        raise FormatError(rule, f"expected at most {MAX_CONFIG} bytes of JSON, found more", where=location)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(rule, f"not JSON: {error}", where=location) from error
    if not isinstance(config, dict):
        raise FormatError(rule, f"expected a JSON object, found {type(config).__name__}", where=location)
    return config


class _Reads(Protocol):
    def read(self, name: str, limit: int, rule: str, /) -> bytes: ...


def stored_config(store: _Reads, rule: str) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a store; raise the errors of ``parse_config`` and ``store.read``."""
    return parse_config(store.read(CONFIG, MAX_CONFIG, rule), rule, CONFIG)
