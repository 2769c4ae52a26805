"""The values of a base with adapters equal the formulas of LoRA, rsLoRA and DoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.adapters.view import with_adapters
from ingot.cli.main import run
from ingot.core.numeric.dtypes import cast
from tests.support.adapters import DOWN, EMBED, Q, base_folder, lora, peft_folder, values

Array = np.ndarray[Any, np.dtype[Any]]
W = values(16, 16)
A = values(4, 16, seed=1)
B = values(16, 4, seed=1)


def merged(base: Path, *adapters: Any) -> dict[str, Array]:
    with ingot.open(base) as opened, with_adapters(opened, list(adapters)) as view:
        return {name: tensor.numpy().copy() for name, tensor in view.items()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_folder(tmp_path / "base")


def test_lora_adds_the_scaled_product_and_changes_nothing_else(base: Path, tmp_path: Path) -> None:
    result = merged(base, peft_folder(tmp_path / "a", lora()))
    assert np.array_equal(result[f"{Q}.weight"], W + (B @ A) * np.float32(2))
    with ingot.open(base) as opened:
        for name in (f"{EMBED}.weight", f"{DOWN}.weight", f"{Q}.bias"):
            assert np.array_equal(result[name], opened[name].numpy())


def test_rslora_divides_by_the_square_root_of_the_rank(base: Path, tmp_path: Path) -> None:
    result = merged(base, peft_folder(tmp_path / "a", lora(), use_rslora=True))
    assert np.array_equal(result[f"{Q}.weight"], W + (B @ A) * np.float32(4))


def test_patterns_set_rank_and_alpha_by_module(base: Path, tmp_path: Path) -> None:
    tensors = {**lora(rank=2), **lora(DOWN, cols=40)}
    patterns = {"rank_pattern": {r"layers\.\d+\.self_attn.*": 2}, "alpha_pattern": {"q_proj": 6}}
    result = merged(base, peft_folder(tmp_path / "a", tensors, **patterns))
    factors = values(16, 2, seed=1) @ values(2, 16, seed=1)
    assert np.array_equal(result[f"{Q}.weight"], W + factors * np.float32(3))
    down = values(16, 4, seed=1) @ values(4, 40, seed=1)
    assert np.array_equal(result[f"{DOWN}.weight"], values(16, 40) + down * np.float32(2))


def test_dora_scales_rows_to_the_magnitudes(base: Path, tmp_path: Path) -> None:
    magnitude = np.abs(values(16)) + 1
    tensors = {**lora(), f"{Q}.lora_magnitude_vector": magnitude}
    result = merged(base, peft_folder(tmp_path / "a", tensors, use_dora=True))[f"{Q}.weight"]
    assert np.allclose(np.linalg.norm(result, axis=1), magnitude, rtol=1e-5)
    changed = W + (B @ A) * np.float32(2)
    assert np.allclose(result / magnitude[:, None], changed / np.linalg.norm(changed, axis=1)[:, None], rtol=1e-5)


def test_dora_of_a_transposed_weight_scales_columns(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", config={"model_type": "gpt2"})
    weight = values(12, 20)
    ingot.save(base / "model.safetensors", {"h.0.attn.c_attn.weight": weight})
    magnitude = np.abs(values(20)) + 1
    tensors = {**lora("h.0.attn.c_attn", rows=20, cols=12), "h.0.attn.c_attn.lora_magnitude_vector": magnitude}
    result = merged(base, peft_folder(tmp_path / "a", tensors, use_dora=True, fan_in_fan_out=True))
    assert np.allclose(np.linalg.norm(result["h.0.attn.c_attn.weight"], axis=0), magnitude, rtol=1e-5)


@pytest.mark.parametrize("declared", [True, False])
def test_the_class_of_gpt2_decides_about_square_weights(tmp_path: Path, declared: bool) -> None:
    base = base_folder(tmp_path / "base", config={"model_type": "gpt2"})
    ingot.save(base / "model.safetensors", {"h.0.attn.c_proj.weight": W})
    result = merged(base, peft_folder(tmp_path / "a", lora("h.0.attn.c_proj"), fan_in_fan_out=declared))
    assert np.array_equal(result["h.0.attn.c_proj.weight"], W + (B @ A).T * np.float32(2))


def test_embeddings_are_transposed_products(base: Path, tmp_path: Path) -> None:
    first, second = values(4, 24), values(16, 4)
    tensors = {f"{EMBED}.lora_embedding_A": first, f"{EMBED}.lora_embedding_B": second}
    result = merged(base, peft_folder(tmp_path / "a", tensors))
    assert np.array_equal(result[f"{EMBED}.weight"], values(24, 16) + (second @ first).T * np.float32(2))


def test_saved_modules_biases_and_tokens_replace_values(base: Path, tmp_path: Path) -> None:
    tensors = {
        f"{DOWN}.weight": values(16, 40, seed=3),
        f"{Q}.bias": values(16, seed=3),
        f"{EMBED}.token_adapter.trainable_tokens_delta": values(2, 16, seed=3),
    }
    config = {"modules_to_save": ["down_proj"], "bias": "all", "trainable_token_indices": {"embed_tokens": [5, 23]}}
    result = merged(base, peft_folder(tmp_path / "a", tensors, **config))
    assert np.array_equal(result[f"{DOWN}.weight"], values(16, 40, seed=3))
    assert np.array_equal(result[f"{Q}.bias"], values(16, seed=3))
    expected = values(24, 16)
    expected[[5, 23]] = values(2, 16, seed=3)
    assert np.array_equal(result[f"{EMBED}.weight"], expected)


def test_lora_bias_is_added_with_the_scale(base: Path, tmp_path: Path) -> None:
    tensors = {**lora(), f"{Q}.lora_B.bias": values(16, seed=4)}
    result = merged(base, peft_folder(tmp_path / "a", tensors, lora_bias=True))
    assert np.array_equal(result[f"{Q}.bias"], values(16) + values(16, seed=4) * np.float32(2))


EXPERTS = "model.layers.0.mlp.experts"


def expert_factors() -> dict[str, Array]:
    """Return factors of two parameters of three experts, rank 4: gate_up [3, 12, 16] and down [3, 16, 6]."""
    return {
        f"{EXPERTS}.base_layer.lora_A.weight": values(12, 16, seed=1),
        f"{EXPERTS}.base_layer.lora_B.weight": values(12, 12, seed=1),
        f"{EXPERTS}.lora_A.weight": values(12, 6, seed=2),
        f"{EXPERTS}.lora_B.weight": values(16, 12, seed=2),
    }


def expert_product(seed: int, rows: int, cols: int, index: int) -> Array:
    first = values(12, cols, seed=seed).reshape(3, 4, cols)[index]
    second = values(rows, 12, seed=seed).reshape(rows, 4, 3)[:, :, index]
    return (second @ first) * np.float32(2)


PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def test_fused_experts_take_their_factors(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", config={"model_type": "qwen3_moe"})
    stacks = {f"{EXPERTS}.gate_up_proj": values(3, 12, 16), f"{EXPERTS}.down_proj": values(3, 16, 6)}
    ingot.save(base / "model.safetensors", stacks)
    result = merged(base, peft_folder(tmp_path / "a", expert_factors(), **PARAMETERS))
    for index in range(3):
        gate_up = values(3, 12, 16)[index] + expert_product(1, 12, 16, index)
        assert np.array_equal(result[f"{EXPERTS}.gate_up_proj"][index], gate_up)
        down = values(3, 16, 6)[index] + expert_product(2, 16, 6, index)
        assert np.array_equal(result[f"{EXPERTS}.down_proj"][index], down)


def test_separate_experts_of_the_base_get_their_parts(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", config={"model_type": "qwen3_moe"})
    shapes = {"gate_proj": (6, 16), "up_proj": (6, 16), "down_proj": (16, 6)}
    ingot.save(
        base / "model.safetensors",
        {f"{EXPERTS}.{i}.{part}.weight": values(*shape) for i in range(3) for part, shape in shapes.items()},
    )
    result = merged(base, peft_folder(tmp_path / "a", expert_factors(), **PARAMETERS))
    gate_up = expert_product(1, 12, 16, 2)
    assert np.array_equal(result[f"{EXPERTS}.2.gate_proj.weight"], values(6, 16) + gate_up[:6])
    assert np.array_equal(result[f"{EXPERTS}.2.up_proj.weight"], values(6, 16) + gate_up[6:])
    assert np.array_equal(result[f"{EXPERTS}.1.down_proj.weight"], values(16, 6) + expert_product(2, 16, 6, 1))


def test_square_experts_follow_the_family(tmp_path: Path) -> None:
    tensors = {
        f"{EXPERTS}.lora_A.weight": values(12, 8, seed=1),
        f"{EXPERTS}.lora_B.weight": values(8, 12, seed=1),
    }
    adapter = peft_folder(tmp_path / "a", tensors, target_parameters=["mlp.experts.down_proj"])
    for model_type, transposed in (("qwen3_moe", False), ("gpt_oss", True)):
        base = base_folder(tmp_path / model_type, config={"model_type": model_type})
        ingot.save(base / "model.safetensors", {f"{EXPERTS}.down_proj": values(3, 8, 8)})
        product = expert_product(1, 8, 8, 1)
        expected = values(3, 8, 8)[1] + (product.T if transposed else product)
        assert np.array_equal(merged(base, adapter)[f"{EXPERTS}.down_proj"][1], expected)


def test_weights_scale_each_adapter_and_all_start_from_the_base(base: Path, tmp_path: Path) -> None:
    first = peft_folder(tmp_path / "a", lora())
    second = peft_folder(tmp_path / "b", lora(seed=2))
    result = merged(base, f"{first}:0.5", (second, -2.0))[f"{Q}.weight"]
    other = values(16, 4, seed=2) @ values(4, 16, seed=2)
    expected = W.astype(np.float64) + (B @ A).astype(np.float64) - 4.0 * other
    assert np.allclose(result, expected, atol=1e-5)
    assert np.array_equal(merged(base, (first, 0.0))[f"{Q}.weight"], W)


def test_values_are_rounded_once_to_the_type_of_the_base(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", dtype="bf16")
    adapter = peft_folder(tmp_path / "a", lora())
    wide = cast(cast(W, "bf16"), "f32") + (B @ A) * np.float32(2)
    assert np.array_equal(merged(base, adapter)[f"{Q}.weight"].view(np.uint16), cast(wide, "bf16").view(np.uint16))


def test_rows_can_be_read_in_any_order(base: Path, tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "a", {**lora(), **lora(DOWN, cols=40)})
    full = merged(base, adapter)
    with ingot.open(base) as opened, with_adapters(opened, [adapter]) as view:
        assert np.array_equal(view[f"{DOWN}.weight"][5:7, 3:9], full[f"{DOWN}.weight"][5:7, 3:9])
        assert np.array_equal(view[f"{DOWN}.weight"][1], full[f"{DOWN}.weight"][1])


def test_the_method_of_a_checkpoint_is_the_view(base: Path, tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "a", lora())
    with ingot.open(base) as opened, opened.with_adapters([f"{adapter}:0.5"]) as view:
        assert np.array_equal(view[f"{Q}.weight"].numpy(), merged(base, (adapter, 0.5))[f"{Q}.weight"])


def test_a_copy_of_the_view_has_the_same_values(base: Path, tmp_path: Path) -> None:
    import pickle

    adapter = peft_folder(tmp_path / "a", lora())
    with ingot.open(base) as opened, with_adapters(opened, [adapter]) as view:
        copy = pickle.loads(pickle.dumps(view))
        assert np.array_equal(copy[f"{Q}.weight"].numpy(), view[f"{Q}.weight"].numpy())
        assert copy.identity() == view.identity()
        copy.close()


def test_mlx_factors_are_transposed(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mlx"
    folder.mkdir()
    tensors = {f"{Q}.lora_a": A.T.copy(), f"{Q}.lora_b": B.T.copy()}
    ingot.save(folder / "adapters.safetensors", tensors)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert np.array_equal(merged(base, folder)[f"{Q}.weight"], W + (B @ A) * np.float32(2))


def test_patch_merges_adapters_and_refuses_options_that_a_merge_lacks(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = peft_folder(tmp_path / "a", lora())
    assert run(["merge", str(base), str(adapter), "-o", str(tmp_path / "merged")]) == 0
    assert run(["patch", str(base), str(adapter), "-o", str(tmp_path / "patched")]) == 0
    names = ("model.safetensors", "config.json")
    assert [(tmp_path / "patched" / name).read_bytes() for name in names] == [
        (tmp_path / "merged" / name).read_bytes() for name in names
    ]
    capsys.readouterr()
    assert run(["patch", str(base), str(adapter), "-o", str(tmp_path / "other"), "--dtype", "f16"]) != 0
    assert "no option --dtype" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
