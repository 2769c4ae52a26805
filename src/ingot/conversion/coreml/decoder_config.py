"""The properties of a decoder that its Core ML program computes with, from a model's ``config.json``.

Formulas are those of transformers' ``modeling_*.py`` of each family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError
from ingot.translate.config_numbers import head_size, heads, integer, is_number
from ingot.translate.rotary import llama3_factors, rope_of, sliding_rope_of

RULE = "coreml.model"
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_MAX_LAYERS = 1 << 12
_MAX_HEAD = 1 << 12
_GELU = "gelu_pytorch_tanh"
_SLIDING = "sliding_attention"
_LAYER_TYPES = (_SLIDING, "full_attention")


@dataclass(frozen=True, slots=True)
class _Family:
    """The differences between families.

    ``biases`` lists linear layers with a bias, by the setting that turns it on; an empty setting is always on.
    ``gemma`` is Gemma's generation, 0 for other families. ``activation`` is the setting that names the activation.
    """

    biases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    head_norms: bool = False
    gemma: int = 0
    activation: str = "hidden_act"


_BIASES = ("attention_bias", _ATTENTION)
_FAMILIES = {
    "llama": _Family((_BIASES, ("mlp_bias", _MLP))),
    "mistral": _Family(),
    "qwen2": _Family((("", _ATTENTION[:3]),)),
    "qwen3": _Family((_BIASES,), head_norms=True),
    "gemma": _Family((_BIASES,), gemma=1),
    "gemma2": _Family((_BIASES,), gemma=2, activation="hidden_activation"),
    "gemma3_text": _Family((_BIASES,), head_norms=True, gemma=3, activation="hidden_activation"),
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder for which a program can be generated.

    Parameters
    ----------
    norm_offset : bool
        Whether norms multiply by 1 + weight, the residual stream is computed in f32, and embeddings are scaled: Gemma.
    sandwich : bool
        Whether the outputs of attention and MLP are normed too.
    sliding : tuple of bool
        For each layer, whether its attention is limited to ``window`` tokens.
    frequencies, sliding_frequencies : tuple of float
        Radians per position of the rotary embedding, for layers with full and with limited attention.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    eps: float
    tied_head: bool
    gelu: bool
    biases: tuple[str, ...]
    head_norms: bool
    norm_offset: bool
    sandwich: bool
    score_scale: float
    score_cap: float | None
    logit_cap: float | None
    window: int
    sliding: tuple[bool, ...]
    frequencies: tuple[float, ...]
    sliding_frequencies: tuple[float, ...]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of every parameter."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        dim = self.head_dim
        queries = self.heads * dim
        keys = self.kv_heads * dim
        sizes = dict(
            zip(_ATTENTION, ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)), strict=True)
        )
        sizes |= dict(zip(_MLP, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
        layer: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in sizes.items()}
        layer |= {f"{name}.bias": sizes[name][:1] for name in self.biases}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        layer |= {f"{name}.weight": (hidden,) for name in norms}
        if self.head_norms:
            layer |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        if not self.tied_head:
            yield "lm_head.weight", (self.vocab_size, hidden)
        for index in range(self.layers):
            for name, shape in layer.items():
                yield f"model.layers.{index}.{name}", shape


def parse_decoder(config: Mapping[str, Any]) -> Decoder:
    """Return the decoder that ``config.json`` describes.

    Raises ``UnsupportedError``: ``coreml.model``: another family, or a setting without a program;
    ``architecture.config``: an invalid number.
    """
    name = str(config.get("model_type"))
    family = _FAMILIES.get(name)
    if family is None:
        raise _refuse("model_type", f"one of {', '.join(_FAMILIES)}, which have a Core ML program", name)
    layers = integer(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise _refuse("num_hidden_layers", f"at most {_MAX_LAYERS}", layers)
    if config.get("use_bidirectional_attention"):
        raise _refuse("use_bidirectional_attention", "false", config["use_bidirectional_attention"])
    head_count, kv_heads, head_dim = _heads(config)
    window = _window(name, config)
    sandwich = family.gemma > 1
    caps = (50.0, 30.0) if family.gemma == 2 else (None, None)
    rope = rope_of(config)
    return Decoder(
        family=name,
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "intermediate_size"),
        layers=layers,
        heads=head_count,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=integer(config, "vocab_size"),
        context=integer(config, "max_position_embeddings"),
        eps=_positive(config, "rms_norm_eps", 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", family.gemma > 0)),
        gelu=_is_gelu(family, config),
        biases=tuple(item for key, names in family.biases if not key or config.get(key) for item in names),
        head_norms=family.head_norms,
        norm_offset=family.gemma > 0,
        sandwich=sandwich,
        score_scale=(_positive(config, "query_pre_attn_scalar", 256) if sandwich else head_dim) ** -0.5,
        score_cap=_cap(config, "attn_logit_softcapping", caps[0]) if sandwich else None,
        logit_cap=_cap(config, "final_logit_softcapping", caps[1]) if sandwich else None,
        window=window,
        sliding=_sliding_layers(name, config, layers) if window else (False,) * layers,
        frequencies=_frequencies(rope, head_dim),
        sliding_frequencies=_frequencies(_sliding_rope(config) if family.gemma == 3 else rope, head_dim),
    )


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the counts of heads and of key-value heads, and the size of a head."""
    head_count, kv_heads = heads(config)
    head_dim = head_size(config)
    if head_count % kv_heads or head_dim % 2 or head_dim > _MAX_HEAD:
        raise _refuse(
            "num_attention_heads",
            f"a multiple of num_key_value_heads, with an even head_dim of at most {_MAX_HEAD}",
            (head_count, kv_heads, head_dim),
        )
    return head_count, kv_heads, head_dim


def _sliding_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **sliding_rope_of(config)}


def _frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Return radians per position of each pair of a head's channels; raise ``coreml.model`` for another scaling."""
    theta = _positive(rope, "rope_theta", 10000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1:
        raise _refuse("partial_rotary_factor", "1", rope["partial_rotary_factor"])
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factors: Any = 1.0
    if rope["rope_type"] == "linear":
        factors = _positive(rope, "factor", 1.0)
    elif rope["rope_type"] == "llama3":
        factors = llama3_factors(rope, head_dim)
    if factors is None or rope["rope_type"] not in ("default", "linear", "llama3"):
        raise _refuse("rope_parameters", "valid parameters of the type default, linear or llama3", dict(rope))
    return tuple((frequencies / factors).tolist())


def _is_gelu(family: _Family, config: Mapping[str, Any]) -> bool:
    """Return whether the MLP's activation is the GELU of Gemma, else SiLU; raise ``coreml.model`` for another one."""
    expected = _GELU if family.gemma else "silu"
    value = config.get(family.activation) or expected
    if value != expected and not (family.gemma == 1 and value == "gelu"):  # the first releases name it so
        raise _refuse(family.activation, expected, value)
    return family.gemma > 0


def _window(name: str, config: Mapping[str, Any]) -> int:
    """Return the number of tokens that limited attention reads; 0 if the model has no such layers."""
    limited = name in ("mistral", "gemma2", "gemma3_text") or (
        name in ("qwen2", "qwen3") and bool(config.get("use_sliding_window"))
    )
    value = config.get("sliding_window", None if name == "mistral" else 4096)
    return integer({"sliding_window": value}, "sliding_window") if limited and value is not None else 0


def _sliding_layers(name: str, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its attention is limited."""
    if name == "mistral":
        return (True,) * layers
    types = config.get("layer_types")
    if types is None and name.startswith("qwen"):
        first = config.get("max_window_layers", 28)
        return tuple(is_number(first) and index >= first for index in range(layers))
    if types is None:
        pattern = integer(config, "sliding_window_pattern", 6) if name == "gemma3_text" else 2
        return tuple(bool((index + 1) % pattern) for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or not all(item in _LAYER_TYPES for item in types):
        raise _refuse("layer_types", f"{layers} of {' and '.join(_LAYER_TYPES)}", types)
    return tuple(item == _SLIDING for item in types)


def _cap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Return the limit of ``limit * tanh(x / limit)``; None if there is none."""
    value = config.get(key, default)
    return None if value is None else _positive({key: value}, key, 1.0)


def _positive(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not is_number(value) or not 0 < value < 1e30:
        raise _refuse(key, "a number above 0", value)
    return float(value)


def _refuse(key: str, expected: str, value: object) -> UnsupportedError:
    return UnsupportedError(f"expected the model's {key} to be {expected}; found {value!r:.120}", rule=RULE)
