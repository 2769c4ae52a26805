"""What ``config.json`` implies is what transformers' own classes save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.translate.expected import expected_tensors

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 56, "max_position_embeddings": 64, "head_dim": 20, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 2, "head_dim": 8,
    "first_k_dense_replace": 1, "moe_intermediate_size": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("mixtral", {"num_local_experts": 3}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("phi3", {}),
    ("starcoder2", {"tie_word_embeddings": False}),
    ("starcoder2", {"use_bias": False}),
    ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 28}),
    ("bert", {"head_dim": None}),
    ("roberta", {"head_dim": None}),
    ("xlm-roberta", {"head_dim": None}),
]


@pytest.mark.parametrize(
    ("family", "more"), CASES, ids=[f"{family}-{index}" for index, (family, _) in enumerate(CASES)]
)
def test_expected_tensors_are_those_that_transformers_saves(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **more})
    auto = transformers.AutoModel if "bert" in family else transformers.AutoModelForCausalLM
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with ingot.open(tmp_path) as checkpoint:
        saved = {name: tensor.shape for name, tensor in checkpoint.items() if not name.startswith("pooler.")}
    stated = json.loads((tmp_path / "config.json").read_text())
    assert expected_tensors(stated) == saved
    del stated["hidden_size"]
    assert expected_tensors(stated) is None


def test_other_classes_and_families_are_not_known() -> None:
    assert expected_tensors({"model_type": "whisper"}) is None
    assert (
        expected_tensors({**SIZES, "model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}) is None
    )
