"""Adapters that the package peft writes: merged values equal ``merge_and_unload`` in f32, rounded once, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.adapters.view import with_adapters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TINY = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama() -> Any:
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, attention_bias=True)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def experts() -> Any:
    config = transformers.Qwen3MoeConfig(
        **TINY, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=16
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> Any:
    sizes = {**TINY, "intermediate_size": 64}
    config = transformers.GptOssConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=16
    )
    return transformers.GptOssForCausalLM(config)


FUSED = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "lora": (llama, {"target_modules": ["q_proj", "k_proj", "gate_proj", "down_proj"]}),
    "rslora-patterns": (
        llama,
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, r"layers\.1\..*v_proj": 1},
            "alpha_pattern": {"layers.1.mlp.*": 3},
        },
    ),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "saved-modules": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "biases": (llama, {"target_modules": ["q_proj"], "bias": "all", "layers_to_transform": [1]}),
    "lora-bias": (llama, {"target_modules": ["q_proj"], "lora_bias": True}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5, 90]}}),
    "parameters": (llama, {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "gpt2-dora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "separate-experts": (experts, FUSED),
    "transposed-experts": (gpt_oss, FUSED),
}


def write_case(folder: Path, name: str) -> None:
    """Write ``base`` in bf16, the adapter, and PEFT's merged model in bf16 and in f32."""
    build, config = CASES[name]
    torch.manual_seed(0)
    model = build()
    model.to(torch.bfloat16).save_pretrained(folder / "base")
    base = type(model).from_pretrained(folder / "base", dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **config))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.02
    adapted.save_pretrained(folder / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder / "f32")
    merged.to(torch.bfloat16).save_pretrained(folder / "bf16")


@pytest.mark.parametrize("name", CASES)
def test_merged_values_equal_those_of_peft(tmp_path: Path, name: str) -> None:
    write_case(tmp_path, name)
    changed = 0
    for dtype in ("f32", "bf16"):
        with (
            ingot.open(tmp_path / "base") as base,
            ingot.open(tmp_path / dtype) as expected,
            with_adapters(base, [tmp_path / "adapter"], exact=dtype == "f32") as view,
        ):
            assert set(view) == set(expected)
            for key, tensor in expected.items():
                assert np.array_equal(view[key].numpy("f32"), tensor.numpy("f32")), key
                changed += not np.array_equal(base[key].numpy("f32"), tensor.numpy("f32"))
    assert changed >= 2
