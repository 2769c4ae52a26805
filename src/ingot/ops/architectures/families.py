"""Which architectures are known: transformers' model type, llama.cpp's name, and what of their tensors differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_ENDS = ("model.embed_tokens", "model.norm", "lm_head")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))
_DENSE = (*_NORMS, *_ATTENTION, *_MLP)
_FUSED = (*_NORMS, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_FOUR_NORMS = (*_DENSE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Experts:
    """A matrix for each expert: where in a layer they are, and the module that is llama.cpp's gate, down and up."""

    prefix: str
    modules: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """One model type.

    Parameters
    ----------
    model_type, model_class : str
        As ``config.json`` has them.
    arch : str
        llama.cpp's name.
    layer : tuple of str
        Modules of a layer, as transformers has them; ``ends`` those outside.
    permuted : bool
        Rows of q and k: llama.cpp pairs neighbours in the rotary embedding, transformers halves.
    shifted : bool
        Norms multiply by 1 + w in transformers, by w in llama.cpp.
    experts : Experts, optional
    defaults : mapping
        Keys of ``config.json`` that this family needs and GGUF metadata do not state.
    """

    model_type: str
    model_class: str
    arch: str
    layer: tuple[str, ...] = _DENSE
    ends: tuple[str, ...] = _ENDS
    permuted: bool = False
    shifted: bool = False
    experts: Experts | None = None
    expert_count: str = "num_experts"
    defaults: Mapping[str, object] = field(default_factory=dict)


_QWEN_EXPERTS = Experts("mlp.experts", {"gate_proj": "gate", "down_proj": "down", "up_proj": "up"})
_SILU = {"hidden_act": "silu"}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", "llama", permuted=True, defaults=_SILU),
        Family("mistral", "MistralForCausalLM", "llama", permuted=True, defaults=_SILU),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "llama",
            (*_NORMS, *_ATTENTION, "block_sparse_moe.gate"),
            permuted=True,
            experts=Experts("block_sparse_moe.experts", {"w1": "gate", "w2": "down", "w3": "up"}),
            expert_count="num_local_experts",
            defaults=_SILU,
        ),
        Family("qwen2", "Qwen2ForCausalLM", "qwen2", defaults=_SILU),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            "qwen2moe",
            (*_NORMS, *_ATTENTION, "mlp.gate", "mlp.shared_expert_gate", *_SHARED),
            experts=_QWEN_EXPERTS,
            defaults=_SILU,
        ),
        Family("qwen3", "Qwen3ForCausalLM", "qwen3", (*_DENSE, *_HEAD_NORMS), defaults=_SILU),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "qwen3moe",
            (*_NORMS, *_ATTENTION, *_HEAD_NORMS, "mlp.gate"),
            experts=_QWEN_EXPERTS,
            defaults=_SILU,
        ),
        Family("gemma", "GemmaForCausalLM", "gemma", shifted=True),
        Family("gemma2", "Gemma2ForCausalLM", "gemma2", _FOUR_NORMS, shifted=True),
        Family("gemma3_text", "Gemma3ForCausalLM", "gemma3", (*_FOUR_NORMS, *_HEAD_NORMS), shifted=True),
        Family("phi3", "Phi3ForCausalLM", "phi3", _FUSED, defaults=_SILU),
        Family("starcoder2", "Starcoder2ForCausalLM", "starcoder2", (*_NORMS, *_ATTENTION, "mlp.c_fc", "mlp.c_proj")),
    )
}  # fmt: skip
"""By transformers' model type. Of those of one llama.cpp architecture the first is what a GGUF file is taken for."""


def family_of(arch: str, *, experts: bool) -> Family | None:
    """Return the family that a GGUF file's architecture stands for."""
    for family in FAMILIES.values():
        if family.arch == arch and (arch != "llama" or (family.experts is not None) == experts):
            return family
    return None
