"""Supported architectures: transformers' model type, llama.cpp's name, and how their tensors differ."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

UNSUPPORTED = "architecture.unknown"
"""The rule for models of families that Ingot does not translate."""

_ENDS = ("model.embed_tokens", "model.norm", "lm_head")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))
_DENSE = (*_NORMS, *_ATTENTION, *_MLP)
_FUSED = (*_NORMS, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_FOUR_NORMS = (*_DENSE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Experts:
    """One matrix per expert: the experts' prefix in a layer, and each module's part (gate, down or up) in llama.cpp."""

    prefix: str
    modules: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """One model type.

    Parameters
    ----------
    model_type, model_class : str
        Values in ``config.json``.
    arch : str
        llama.cpp's name of the architecture.
    layer : tuple of str
        Modules of a layer in transformers' names. ``ends`` are the modules outside of layers, ``block`` the name before
        a layer's index.
    heads : tuple of str
        Modules of ``ends`` that belong to a model's head. In such a model the names of all others begin with ``base``.
    biased : tuple of str, optional
        Modules that may have a bias in llama.cpp, which refuses a bias of any other module; None: all.
    tied : bool
        Whether llama.cpp always uses the embedding as the head.
    classifier : mapping
        Modules of a classifier over the first token, and the modules whose names llama.cpp uses for them.
    unused : tuple of str
        Name prefixes of tensors that llama.cpp's graph does not use.
    spelled : mapping
        Tensors of a layer with irregular names, and the same names with llama.cpp's ending.
    permuted : bool
        Whether rows of q and k are reordered: rotary embedding pairs neighbours in llama.cpp, halves in transformers.
    shifted : bool
        Whether norms multiply by 1 + w in transformers (llama.cpp multiplies by w).
    interleaved : bool
        Whether transformers also stacks experts, transposed, with gate and up in alternate columns.
    latent : bool
        Whether keys and values come from a latent vector (DeepSeek's MLA).
    experts : Experts, optional
    expert_count : str
        Key of ``config.json`` for the count of experts.
    keys : tuple of (key of config.json, GGUF key without the architecture's name, type)
        Keys in addition to the common ones, or replacing them.
    fixed : mapping
        Further GGUF keys without the architecture's name, with their types and values.
    defaults : mapping
        Keys of ``config.json`` that this family needs and GGUF metadata lack, with the values that llama.cpp assumes.
    scalar : bool
        Whether ``config.json`` has the divisor of attention scores (``query_pre_attn_scalar``), which GGUF lacks.
    rope : mapping
        Like ``defaults``, for the rotary embedding's parameters; None if the family has no rotary embedding.
    rope_by_layer : bool
        Whether layers with a sliding window have separate rotary parameters.
    partial : bool
        Whether ``partial_rotary_factor`` is used; otherwise the rotary embedding covers the whole head.
    window : int
        Period of llama.cpp's sliding-window layers: the last layer of each period sees all tokens. 0: every layer does.
    padded : bool
        Whether positions are counted from after the padding token's id; llama.cpp has no rows for the earlier ones.
    tokenizer_model : str
        llama.cpp's name of the tokenizer, if it distinguishes the family from others.
    """

    model_type: str
    model_class: str
    arch: str
    layer: tuple[str, ...] = _DENSE
    ends: tuple[str, ...] = _ENDS
    block: str = "model.layers"
    base: str = ""
    heads: tuple[str, ...] = ()
    biased: tuple[str, ...] | None = None
    tied: bool = False
    classifier: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    shifted: bool = False
    interleaved: bool = False
    latent: bool = False
    experts: Experts | None = None
    expert_count: str = "num_experts"
    keys: tuple[tuple[str, str, str], ...] = ()
    fixed: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    scalar: bool = False
    rope: Mapping[str, object] | None = field(default_factory=dict)
    rope_by_layer: bool = False
    partial: bool = False
    window: int = 0
    padded: bool = False
    tokenizer_model: str = ""


_QWEN_EXPERTS = Experts("mlp.experts", {"gate_proj": "gate", "down_proj": "down", "up_proj": "up"})
_SILU = {"hidden_act": "silu"}
_SPARSE = {**_SILU, "decoder_sparse_step": 1, "mlp_only_layers": []}
_OSS_EXPERTS = tuple(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down"))
_LATENT = tuple(
    f"self_attn.{part}"
    for part in (
        *("q_proj", "q_a_proj", "q_b_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
        *("kv_b_proj", "k_b_proj", "v_b_proj", "o_proj"),
    )
)
_SHARED_EXPERTS = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
_CORRECTION = {"mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction.bias"}
_LATENT_KEYS = (
    ("first_k_dense_replace", "leading_dense_block_count", "u32"),
    ("q_lora_rank", "attention.q_lora_rank", "u32"),
    ("kv_lora_rank", "attention.kv_lora_rank", "u32"),
    ("n_shared_experts", "expert_shared_count", "u32"),
    ("routed_scaling_factor", "expert_weights_scale", "f32"),
    ("norm_topk_prob", "expert_weights_norm", "bool"),
    ("n_group", "expert_group_count", "u32"),
    ("topk_group", "expert_group_used_count", "u32"),
)
_ROBERTA_HEADS = ("classifier.dense", "classifier.out_proj")
_BERT_CLASSIFIER = {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's ids of the functions that choose experts."""
_BERT_LAYER = (
    *(f"attention.self.{part}" for part in ("query", "key", "value")),
    *("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)
_BERT_ENDS = tuple(
    f"embeddings.{part}" for part in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
)


def _deepseek(
    version: int, gating: int, layer: tuple[str, ...] = (), extra_defaults: Mapping[str, object] = {}
) -> Family:
    return Family(
        f"deepseek_v{version}",
        f"DeepseekV{version}ForCausalLM",
        "deepseek2",
        (*_NORMS, *_LATENT, *_MLP, *_SHARED_EXPERTS, "mlp.gate", *layer),
        spelled=_CORRECTION,
        latent=True,
        biased=("mlp.gate.e_score_correction",),
        experts=_QWEN_EXPERTS,
        expert_count="n_routed_experts",
        keys=_LATENT_KEYS,
        fixed={"expert_gating_func": ("u32", gating)},
        defaults={**_SILU, "q_lora_rank": None, "attention_bias": False, "moe_layer_freq": 1, **extra_defaults},
    )


def _encoder(
    model_type: str,
    model_class: str,
    heads: tuple[str, ...],
    classifier: Mapping[str, str] = {},
    tokenizer_model: str = "",
) -> Family:
    """Return a BERT family; with a ``tokenizer_model``, one whose positions begin after the padding token's id."""
    return Family(
        model_type,
        model_class,
        "bert",
        _BERT_LAYER,
        (*_BERT_ENDS, *heads),
        "encoder.layer",
        base="roberta." if tokenizer_model else "bert.",
        heads=heads,
        classifier=classifier,
        unused=("pooler.",),
        keys=(
            ("layer_norm_eps", "attention.layer_norm_epsilon", "f32"),
            ("type_vocab_size", "tokenizer.ggml.token_type_count", "u32"),
        ),
        fixed={"attention.causal": ("bool", False)},
        defaults={"hidden_act": "gelu", "position_embedding_type": "absolute"},
        rope=None,
        padded=bool(tokenizer_model),
        tokenizer_model=tokenizer_model,
    )


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", "llama", permuted=True, biased=(*_ATTENTION, *_MLP), defaults=_SILU),
        Family("mistral", "MistralForCausalLM", "llama", permuted=True, biased=(*_ATTENTION, *_MLP), defaults=_SILU),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "llama",
            (*_NORMS, *_ATTENTION, "block_sparse_moe.gate"),
            permuted=True,
            biased=_ATTENTION,
            experts=Experts("block_sparse_moe.experts", {"w1": "gate", "w2": "down", "w3": "up"}),
            expert_count="num_local_experts",
            defaults=_SILU,
        ),
        Family("qwen2", "Qwen2ForCausalLM", "qwen2", biased=(*_QKV, "lm_head"), defaults=_SILU),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            "qwen2moe",
            (*_NORMS, *_ATTENTION, "mlp.gate", "mlp.shared_expert_gate", *_SHARED),
            biased=_QKV,
            experts=_QWEN_EXPERTS,
            defaults={**_SPARSE, "norm_topk_prob": False},
        ),
        Family("qwen3", "Qwen3ForCausalLM", "qwen3", (*_DENSE, *_HEAD_NORMS), biased=_QKV, defaults=_SILU),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "qwen3moe",
            (*_NORMS, *_ATTENTION, *_HEAD_NORMS, "mlp.gate"),
            biased=_QKV,
            experts=_QWEN_EXPERTS,
            defaults={**_SPARSE, "norm_topk_prob": True},
        ),
        Family("gemma", "GemmaForCausalLM", "gemma", biased=_QKV, tied=True, shifted=True),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            "gemma2",
            _FOUR_NORMS,
            biased=_QKV,
            tied=True,
            shifted=True,
            scalar=True,
            window=2,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            "gemma3",
            (*_FOUR_NORMS, *_HEAD_NORMS),
            biased=_QKV,
            shifted=True,
            scalar=True,
            rope_by_layer=True,
            window=6,
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            "phi3",
            _FUSED,
            biased=("self_attn.qkv_proj",),
            defaults=_SILU,
            partial=True,
        ),
        Family("starcoder2", "Starcoder2ForCausalLM", "starcoder2", (*_NORMS, *_ATTENTION, "mlp.c_fc", "mlp.c_proj")),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            "gpt-oss",
            (*_NORMS, *_ATTENTION, "self_attn.sinks", "mlp.router", *_OSS_EXPERTS),
            spelled={"self_attn.sinks": "self_attn.sinks.weight"},
            biased=(*_ATTENTION, "mlp.router", *_OSS_EXPERTS),
            interleaved=True,
            expert_count="num_local_experts",
            keys=(
                ("intermediate_size", "expert_feed_forward_length", "u32"),
                ("num_local_experts", "expert_count", "u32"),
            ),
            defaults={**_SILU, "attention_bias": True},
            rope={"truncate": False},
            window=2,
        ),
        _deepseek(3, _SIGMOID, ("mlp.gate.e_score_correction",), {"rope_interleave": True}),
        _deepseek(2, _SOFTMAX, extra_defaults={"topk_method": None}),
        _encoder("roberta", "RobertaModel", _ROBERTA_HEADS, tokenizer_model="gpt2"),
        _encoder("xlm-roberta", "XLMRobertaModel", _ROBERTA_HEADS, tokenizer_model="t5"),
        _encoder("bert", "BertModel", ("classifier",), _BERT_CLASSIFIER),
    )
}  # fmt: skip
"""By transformers' model type. A GGUF file is read as the first family that matches its architecture."""


def family_of(arch: str, metadata: Mapping[str, object]) -> Family | None:
    """Return the family that a GGUF file's architecture and metadata describe; None if it is unsupported."""
    candidates = [family for family in FAMILIES.values() if family.arch == arch]
    experts = bool(metadata.get(f"{arch}.expert_count"))
    for family in candidates:
        matches = all(metadata.get(f"{arch}.{key}", value) == value for key, (_, value) in family.fixed.items())
        matches = matches and family.tokenizer_model in ("", metadata.get("tokenizer.ggml.model"))
        if matches and (arch != "llama" or (family.experts is not None) == experts):
            return family
    return None


def has_classifier(family: Family, names: Container[str]) -> bool:
    """Return whether the names contain a weight of each module of the family's classifier."""
    modules = family.classifier
    return bool(modules) and all(
        f"{family.base}{module}.weight" in names or f"{module}.weight" in names for module in modules
    )
