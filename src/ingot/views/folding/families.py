"""The modules of each model type in transformers, with the streams that each matrix reads and writes.

A stream is a vector that one module passes to others. ``residual`` is the residual stream. ``attention``, ``mlp`` and
``head`` are outputs of norms. ``value`` are the values of all key-value heads. ``hidden`` are the intermediate
activations of a feed-forward network. ``#`` stands for the index of an expert, in names and streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESIDUAL = "residual"
HEAD = "head"
VALUE = "value"


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the residual stream; its output is the stream ``into``."""

    module: str
    into: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that multiplies the stream ``reads``.

    ``writes`` are the streams of its rows: one stream, or the streams of consecutive blocks of rows (two halves, or
    queries, keys and values). An empty name is a stream into which nothing is folded. ``stacked`` states that the
    tensor has three dimensions, contains the matrices of all experts, and has a name without ``.weight``.
    """

    module: str
    reads: str
    writes: tuple[str, ...] = ("",)
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class OtherModule:
    """A module that folding does not change.

    ``post_norm`` is true for a norm of the output of a layer's matrix, before the sum with the residual stream.
    """

    module: str
    post_norm: bool = False


Module = Norm | Matrix | OtherModule


@dataclass(frozen=True, slots=True)
class Wiring:
    """The modules of a model type's layers and their streams, and the settings that all layers share.

    If ``shifted`` is true, norms multiply by 1 + w. If ``config.json`` does not state whether the head is the
    embedding, ``tied`` does. ``layers``, ``embedding``, ``norm`` and ``head`` are names of modules.
    """

    layer: tuple[Module, ...]
    shifted: bool = False
    tied: bool = False
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


_HEADS = (
    Matrix("self_attn.q_proj", "attention"),
    Matrix("self_attn.k_proj", "attention"),
    Matrix("self_attn.v_proj", "attention", (VALUE,)),
    Matrix("self_attn.o_proj", VALUE, (RESIDUAL,)),
)
_HEAD_NORMS = (OtherModule("self_attn.q_norm"), OtherModule("self_attn.k_norm"))
_NORMS = (Norm("input_layernorm", "attention"), Norm("post_attention_layernorm", "mlp"))
_FOUR_NORMS = (
    Norm("input_layernorm", "attention"),
    OtherModule("post_attention_layernorm", post_norm=True),
    Norm("pre_feedforward_layernorm", "mlp"),
    OtherModule("post_feedforward_layernorm", post_norm=True),
)
_ROTARY = (OtherModule("self_attn.rotary_emb"),)


def _network(
    prefix: str, hidden: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Module, ...]:
    return (
        Matrix(f"{prefix}.{gate}", "mlp"),
        Matrix(f"{prefix}.{up}", "mlp", (hidden,)),
        Matrix(f"{prefix}.{down}", hidden, (RESIDUAL,)),
    )


_MLP = _network("mlp", "hidden")
_DENSE = (*_NORMS, *_HEADS, *_ROTARY, *_MLP)
_FUSED = (
    *_NORMS,
    Matrix("self_attn.qkv_proj", "attention", ("", "", VALUE)),
    Matrix("self_attn.o_proj", VALUE, (RESIDUAL,)),
    *_ROTARY,
    Matrix("mlp.gate_up_proj", "mlp", ("", "hidden")),
    Matrix("mlp.down_proj", "hidden", (RESIDUAL,)),
)
_EXPERTS = (
    Matrix("mlp.gate", "mlp"),
    *_network("mlp.experts.#", "expert.#"),
    Matrix("mlp.experts.gate_up_proj", "mlp", ("", "expert.#"), stacked=True),
    Matrix("mlp.experts.down_proj", "expert.#", (RESIDUAL,), stacked=True),
)
_MIXTRAL = (
    *_NORMS,
    *_HEADS,
    *_ROTARY,
    Matrix("block_sparse_moe.gate", "mlp"),
    *_network("block_sparse_moe.experts.#", "expert.#", "w1", "w3", "w2"),
    *_EXPERTS,
)
_SHARED = (*_network("mlp.shared_expert", "shared"), Matrix("mlp.shared_expert_gate", "mlp"))

WIRINGS: Mapping[str, Wiring] = {
    "llama": Wiring(_DENSE),
    "mistral": Wiring(_DENSE),
    "qwen2": Wiring(_DENSE),
    "qwen3": Wiring((*_DENSE, *_HEAD_NORMS)),
    "gemma": Wiring(_DENSE, shifted=True, tied=True),
    "gemma2": Wiring((*_FOUR_NORMS, *_HEADS, *_ROTARY, *_MLP), shifted=True, tied=True),
    "gemma3_text": Wiring((*_FOUR_NORMS, *_HEADS, *_HEAD_NORMS, *_ROTARY, *_MLP), shifted=True, tied=True),
    "phi3": Wiring(_FUSED),
    "mixtral": Wiring(_MIXTRAL),
    "qwen2_moe": Wiring((*_DENSE, *_EXPERTS, *_SHARED)),
    "qwen3_moe": Wiring((*_DENSE, *_HEAD_NORMS, *_EXPERTS)),
}
