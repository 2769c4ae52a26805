"""The names and shapes of tensors that a model's ``config.json`` implies, computed without loading the model.

Names and shapes are as ``save_pretrained`` of transformers' classes writes them (``modeling_*.py``, 5.23).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.translate.families import Family
from ingot.translate.required_modules import absent_modules
from ingot.translate.settings import layer_types

Shapes = Mapping[str, str]
"""By tensor name, the dimensions separated by spaces. A dimension is a sum of sizes like ``Q+2K`` (see ``_sizes``).
"""

_TERM = re.compile(r"([0-9]*)([A-Za-z]+)")
_MAX_COUNT = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The tensors of one family.

    Parameters
    ----------
    ends : Shapes
        Tensors outside of layers.
    layer : Shapes
        Tensors of every layer, without the layer's prefix.
    dense, sparse : Shapes
        Further tensors of layers without experts, and of layers with experts.
    expert : Shapes
        Tensors of each expert in a sparse layer; ``{}`` in a name stands for the expert's index.
    conditional : mapping of config key to Shapes
        Tensors of a layer that exist if the key is true.
    architecture : str
        The class that saves these tensors; models of other classes are unsupported.
    block : str
        The name before a layer's index.
    tied : bool or None
        Whether the head is tied to the embedding if ``tie_word_embeddings`` is not set; None if there is no head.
    """

    architecture: str
    ends: Shapes
    layer: Shapes
    dense: Shapes = field(default_factory=dict)
    sparse: Shapes = field(default_factory=dict)
    expert: Shapes = field(default_factory=dict)
    conditional: Mapping[str, Shapes] = field(default_factory=dict)
    block: str = "model.layers"
    tied: bool | None = False


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shape of every tensor that a model with this ``config.json`` has; None if it cannot be determined.

    The result is None if the family or the saved class is unsupported, or if the config lacks a size.
    """
    shapes = _FAMILIES.get(str(config.get("model_type")))
    if shapes is None or config.get("architectures", [shapes.architecture]) != [shapes.architecture]:
        return None
    try:
        sizes = _sizes(config)
        layers = _count(config, "num_hidden_layers")
        return _expand(shapes, config, sizes, layers)
    except KeyError:
        return None


def absent_tensors(config: Mapping[str, Any], family: Family, names: Iterable[str]) -> list[str]:
    """Return the names of tensors that a model of the family needs and that are not among ``names``.

    This check is for families without ``ModelShapes``. It requires the tensors outside of layers, each layer, and the
    modules that other modules of a layer need (``required_modules``). If a layer has all tensors of a second layer and
    more, then the second layer lacks the additional tensors. Heads are not required, because they may be tied to the
    embedding. The result is empty if the config does not declare the number of layers.
    """
    count = config.get(family.aliases.get("num_hidden_layers", "num_hidden_layers"), config.get("num_hidden_layers"))
    count = len(layer_types(config)) if count is None else count
    if type(count) is not int or not 0 < count <= _MAX_COUNT:
        return []
    present = {name.removeprefix(family.base) for name in names}
    heads = {*family.heads, "lm_head", "embed_out"}
    required = [f"{module}.weight" for module in family.ends if module not in heads]
    absent = [name for name in required if name not in present]
    prefix = f"{family.block}."
    layers: dict[int, set[str]] = {}
    for name in present:
        number, _, inner = name.removeprefix(prefix).partition(".") if name.startswith(prefix) else ("", "", "")
        is_optional = inner.endswith("inv_freq") or inner.rpartition(".")[0] in family.optional
        if inner and number.isdecimal() and len(number) < 7 and not is_optional:
            layers.setdefault(int(number), set()).add(inner)
    absent += [f"{prefix}{index}.*" for index in range(count) if index not in layers]
    contents = {index: frozenset(layers[index]) for index in range(count) if index in layers}
    types = set(contents.values())
    larger = {narrow: max((wide for wide in types if narrow < wide), key=len, default=narrow) for narrow in types}
    for index, content in contents.items():
        absent += [f"{prefix}{index}.{name}" for name in sorted(larger[content] - content)]
    absent += [prefix + name for name in absent_modules(layers, family)]
    return list(dict.fromkeys(absent))


def _expand(
    shapes: ModelShapes, config: Mapping[str, Any], sizes: Mapping[str, int], layers: int
) -> dict[str, tuple[int, ...]]:
    tensors = {name: _shape(text, sizes) for name, text in shapes.ends.items()}
    if shapes.tied is not None and not config.get("tie_word_embeddings", shapes.tied):
        tensors["lm_head.weight"] = _shape("V H", sizes)
    for layer in range(layers):
        group = dict(shapes.layer)
        for key, extra in shapes.conditional.items():
            if config.get(key) is True:
                group |= extra
        if _is_sparse(shapes, config, layer):
            group |= shapes.sparse
            experts = range(sizes["E"]) if shapes.expert else ()
            group |= {name.format(expert): text for expert in experts for name, text in shapes.expert.items()}
        else:
            group |= shapes.dense
        if config.get("model_type") in _LATENT:
            group |= _LATENT_QUERY if config.get("q_lora_rank") is None else _LATENT_LOW_RANK_QUERY
        tensors |= {f"{shapes.block}.{layer}.{name}": _shape(text, sizes) for name, text in group.items()}
    return tensors


def _is_sparse(shapes: ModelShapes, config: Mapping[str, Any], layer: int) -> bool:
    if not shapes.sparse:
        return False
    if layer < config.get("first_k_dense_replace", 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if layer % (config.get("moe_layer_freq") or 1):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _shape(text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape that a text describes; raises ``KeyError`` for a size that the config lacks."""
    return tuple(
        sum(int(factor or 1) * sizes[name] for factor, name in _TERM.findall(dimension)) for dimension in text.split()
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if type(value) is not int or not 0 < value <= _MAX_COUNT:
        raise KeyError(key)
    return value


class _Sizes(dict[str, int]):
    """Sizes by their letter, computed on first use; raises ``KeyError`` if the config lacks an input."""

    def __init__(self, compute: Mapping[str, Callable[[], int]]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, name: str) -> int:
        value = self[name] = self._compute[name]()
        return value


def _sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the sizes by the letters that ``ModelShapes`` uses.

    V vocabulary, H hidden, I intermediate, N heads, D head, Q all query heads, K all key heads, E experts, M
    intermediate of an expert, S intermediate of the shared experts, P positions, T token types. ``One`` is 1. For
    latent attention: R rank of keys and values, L rank of queries, Y rotary part of a head, Z all query heads, X keys
    and values of all heads, W values of all heads.
    """

    def read_size(key: str) -> int:
        value = config[key]
        if type(value) is not int or value <= 0:
            raise KeyError(key)
        return value

    def heads() -> int:
        return read_size("num_attention_heads")

    def key_heads() -> int:
        return heads() if config.get("num_key_value_heads") is None else read_size("num_key_value_heads")

    def head() -> int:
        return read_size("hidden_size") // heads() if config.get("head_dim") is None else read_size("head_dim")

    def experts() -> int:
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        return _count(config, next((key for key in keys if config.get(key) is not None), keys[0]))

    def shared() -> int:
        if config.get("n_shared_experts") is not None:
            return read_size("moe_intermediate_size") * read_size("n_shared_experts")
        return read_size("shared_expert_intermediate_size")

    return _Sizes(
        {
            "V": lambda: read_size("vocab_size"),
            "H": lambda: read_size("hidden_size"),
            "I": lambda: read_size("intermediate_size"),
            "N": heads,
            "D": head,
            "Q": lambda: heads() * head(),
            "K": lambda: key_heads() * head(),
            "E": experts,
            "M": lambda: read_size("moe_intermediate_size"),
            "S": shared,
            "P": lambda: read_size("max_position_embeddings"),
            "T": lambda: read_size("type_vocab_size"),
            "One": lambda: 1,
            "R": lambda: read_size("kv_lora_rank"),
            "L": lambda: read_size("q_lora_rank"),
            "Y": lambda: read_size("qk_rope_head_dim"),
            "Z": lambda: heads() * (read_size("qk_nope_head_dim") + read_size("qk_rope_head_dim")),
            "X": lambda: heads() * (read_size("qk_nope_head_dim") + read_size("v_head_dim")),
            "W": lambda: heads() * read_size("v_head_dim"),
        }
    )


_ENDS = {"model.embed_tokens.weight": "V H", "model.norm.weight": "H"}
_NORMS = {"input_layernorm.weight": "H", "post_attention_layernorm.weight": "H"}
_FEED_FORWARD_NORMS = {"pre_feedforward_layernorm.weight": "H", "post_feedforward_layernorm.weight": "H"}
_ATTENTION = {
    "self_attn.q_proj.weight": "Q H",
    "self_attn.k_proj.weight": "K H",
    "self_attn.v_proj.weight": "K H",
    "self_attn.o_proj.weight": "H Q",
}
_QKV_BIAS = {"self_attn.q_proj.bias": "Q", "self_attn.k_proj.bias": "K", "self_attn.v_proj.bias": "K"}
_ATTENTION_BIAS = {**_QKV_BIAS, "self_attn.o_proj.bias": "H"}
_HEAD_NORMS = {"self_attn.q_norm.weight": "D", "self_attn.k_norm.weight": "D"}
_MLP = {"mlp.gate_proj.weight": "I H", "mlp.up_proj.weight": "I H", "mlp.down_proj.weight": "H I"}
_MLP_BIAS = {"mlp.gate_proj.bias": "I", "mlp.up_proj.bias": "I", "mlp.down_proj.bias": "H"}
_LLAMA = {**_NORMS, **_ATTENTION}
_LLAMA_BIASES = {"attention_bias": _ATTENTION_BIAS, "mlp_bias": _MLP_BIAS}
_GATE = {"mlp.gate.weight": "E H"}
_EXPERT = {
    "mlp.experts.{}.gate_proj.weight": "M H",
    "mlp.experts.{}.up_proj.weight": "M H",
    "mlp.experts.{}.down_proj.weight": "H M",
}
_LATENT = ("deepseek_v2", "deepseek_v3")
_LATENT_ATTENTION = {
    **_NORMS,
    "self_attn.kv_a_proj_with_mqa.weight": "R+Y H",
    "self_attn.kv_a_layernorm.weight": "R",
    "self_attn.kv_b_proj.weight": "X R",
    "self_attn.o_proj.weight": "H W",
}
_LATENT_QUERY = {"self_attn.q_proj.weight": "Z H"}
_LATENT_LOW_RANK_QUERY = {
    "self_attn.q_a_proj.weight": "L H",
    "self_attn.q_a_layernorm.weight": "L",
    "self_attn.q_b_proj.weight": "Z L",
}
_SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj.weight": "S H",
    "mlp.shared_experts.up_proj.weight": "S H",
    "mlp.shared_experts.down_proj.weight": "H S",
}
_BERT_MATRICES = {
    "attention.self.query": "H H",
    "attention.self.key": "H H",
    "attention.self.value": "H H",
    "attention.output.dense": "H H",
    "intermediate.dense": "I H",
    "output.dense": "H I",
}


def _with_biases(matrices: Shapes, norms: tuple[str, ...]) -> dict[str, str]:
    weights = {f"{module}.weight": text for module, text in matrices.items()}
    biases = {f"{module}.bias": text.split()[0] for module, text in matrices.items()}
    return weights | biases | {f"{norm}.{part}": "H" for norm in norms for part in ("weight", "bias")}


def _encoder(architecture: str) -> ModelShapes:
    ends = {
        "embeddings.word_embeddings.weight": "V H",
        "embeddings.position_embeddings.weight": "P H",
        "embeddings.token_type_embeddings.weight": "T H",
        "embeddings.LayerNorm.weight": "H",
        "embeddings.LayerNorm.bias": "H",
    }
    layer = _with_biases(_BERT_MATRICES, ("attention.output.LayerNorm", "output.LayerNorm"))
    return ModelShapes(architecture, ends, layer, block="encoder.layer", tied=None)


_FAMILIES: Mapping[str, ModelShapes] = {
    "llama": ModelShapes("LlamaForCausalLM", _ENDS, {**_LLAMA, **_MLP}, conditional=_LLAMA_BIASES),
    "mistral": ModelShapes("MistralForCausalLM", _ENDS, {**_LLAMA, **_MLP}),
    "mixtral": ModelShapes(
        "MixtralForCausalLM",
        _ENDS,
        _LLAMA,
        sparse={"block_sparse_moe.gate.weight": "E H"},
        expert={
            "block_sparse_moe.experts.{}.w1.weight": "I H",
            "block_sparse_moe.experts.{}.w2.weight": "H I",
            "block_sparse_moe.experts.{}.w3.weight": "I H",
        },
    ),
    "qwen2": ModelShapes("Qwen2ForCausalLM", _ENDS, {**_LLAMA, **_QKV_BIAS, **_MLP}),
    "qwen2_moe": ModelShapes(
        "Qwen2MoeForCausalLM",
        _ENDS,
        {**_LLAMA, **_QKV_BIAS},
        dense=_MLP,
        sparse={
            **_GATE,
            "mlp.shared_expert.gate_proj.weight": "S H",
            "mlp.shared_expert.up_proj.weight": "S H",
            "mlp.shared_expert.down_proj.weight": "H S",
            "mlp.shared_expert_gate.weight": "One H",
        },
        expert=_EXPERT,
    ),
    "qwen3": ModelShapes(
        "Qwen3ForCausalLM", _ENDS, {**_LLAMA, **_HEAD_NORMS, **_MLP}, conditional={"attention_bias": _ATTENTION_BIAS}
    ),
    "qwen3_moe": ModelShapes(
        "Qwen3MoeForCausalLM",
        _ENDS,
        {**_LLAMA, **_HEAD_NORMS},
        dense=_MLP,
        sparse=_GATE,
        expert=_EXPERT,
        conditional={"attention_bias": _ATTENTION_BIAS},
    ),
    "gemma": ModelShapes(
        "GemmaForCausalLM", _ENDS, {**_LLAMA, **_MLP}, conditional={"attention_bias": _ATTENTION_BIAS}, tied=True
    ),
    "gemma2": ModelShapes(
        "Gemma2ForCausalLM",
        _ENDS,
        {**_LLAMA, **_FEED_FORWARD_NORMS, **_MLP},
        conditional={"attention_bias": _ATTENTION_BIAS},
        tied=True,
    ),
    "gemma3_text": ModelShapes(
        "Gemma3ForCausalLM",
        _ENDS,
        {**_LLAMA, **_FEED_FORWARD_NORMS, **_HEAD_NORMS, **_MLP},
        conditional={"attention_bias": _ATTENTION_BIAS},
        tied=True,
    ),
    "phi3": ModelShapes(
        "Phi3ForCausalLM",
        _ENDS,
        {
            **_NORMS,
            "self_attn.qkv_proj.weight": "Q+2K H",
            "self_attn.o_proj.weight": "H Q",
            "mlp.gate_up_proj.weight": "2I H",
            "mlp.down_proj.weight": "H I",
        },
    ),
    "starcoder2": ModelShapes(
        "Starcoder2ForCausalLM",
        {**_ENDS, "model.norm.bias": "H"},
        {
            **_LLAMA,
            "input_layernorm.bias": "H",
            "post_attention_layernorm.bias": "H",
            "mlp.c_fc.weight": "I H",
            "mlp.c_proj.weight": "H I",
        },
        conditional={"use_bias": {**_ATTENTION_BIAS, "mlp.c_fc.bias": "I", "mlp.c_proj.bias": "H"}},
        tied=True,
    ),
    "gpt_oss": ModelShapes(
        "GptOssForCausalLM",
        _ENDS,
        {
            **_LLAMA,
            "self_attn.sinks": "N",
            "mlp.router.weight": "E H",
            "mlp.router.bias": "E",
            "mlp.experts.gate_up_proj": "E H 2I",
            "mlp.experts.gate_up_proj_bias": "E 2I",
            "mlp.experts.down_proj": "E I H",
            "mlp.experts.down_proj_bias": "E H",
        },
        conditional={"attention_bias": _ATTENTION_BIAS},
    ),
    "deepseek_v2": ModelShapes(
        "DeepseekV2ForCausalLM",
        _ENDS,
        _LATENT_ATTENTION,
        dense=_MLP,
        sparse={**_GATE, **_SHARED_EXPERTS},
        expert=_EXPERT,
    ),
    "deepseek_v3": ModelShapes(
        "DeepseekV3ForCausalLM",
        _ENDS,
        _LATENT_ATTENTION,
        dense=_MLP,
        sparse={**_GATE, "mlp.gate.e_score_correction_bias": "E", **_SHARED_EXPERTS},
        expert=_EXPERT,
    ),
    "bert": _encoder("BertModel"),
    "roberta": _encoder("RobertaModel"),
    "xlm-roberta": _encoder("XLMRobertaModel"),
}
"""The tensors of each ``model_type``, without those that some checkpoints lack (pooler, rotary frequencies)."""
