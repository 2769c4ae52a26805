"""DeepSeek's FP8 releases: keys and values are split for llama.cpp from FP8, as from a dense copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.model.tensor import Array
from ingot.translate.expected import expected_tensors
from tests.support import model_folder

pytest.importorskip("gguf")
CONFIG: Mapping[str, Any] = {
    **model_folder.CONFIG, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "scoring_func": "sigmoid",
}  # fmt: skip


def weights() -> dict[str, Array]:
    shapes = expected_tensors(CONFIG)
    assert shapes is not None
    random = np.random.default_rng(1)
    return {name: random.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


def latent_of(path: Path) -> dict[str, Array]:
    with ingot.open(path) as checkpoint:
        names = [name for name in checkpoint if name.endswith(("k_b.weight", "v_b.weight")) or "kv_b" in name]
        return {name: checkpoint[name].numpy("f32") for name in names}


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block"])
def test_fp8_is_split_like_a_dense_copy(recipe: str, tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "model", CONFIG, weights())
    format = {"fp8": "compressed-tensors", "fp8-block": "fp8"}[recipe]
    ingot.convert(source, tmp_path / "packed", recipe, format=format)
    with ingot.open(tmp_path / "packed") as checkpoint:
        assert checkpoint["model.layers.0.self_attn.kv_b_proj.weight"].codec == "scaled_codebook"
    ingot.convert(tmp_path / "packed", tmp_path / "dense", "decompress", format="safetensors")
    report = ingot.convert(tmp_path / "packed", tmp_path / "packed.gguf")
    ingot.convert(tmp_path / "dense", tmp_path / "dense.gguf")
    split, expected = (latent_of(tmp_path / f"{name}.gguf") for name in ("packed", "dense"))
    assert sorted(split) == ["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"]
    assert all(np.array_equal(split[name], values) for name, values in expected.items())
    assert not any("attn_kv_b" in note for note in report.notes)


def test_packed_integers_stay_one_matrix_with_a_note(tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "model", CONFIG, weights())
    ingot.convert(source, tmp_path / "packed", "w4a16", format="compressed-tensors")
    report = ingot.convert(tmp_path / "packed", tmp_path / "packed.gguf")
    assert [*latent_of(tmp_path / "packed.gguf")] == ["blk.0.attn_kv_b.weight"]
    assert any("attn_kv_b" in note and "packed" in note for note in report.notes)
