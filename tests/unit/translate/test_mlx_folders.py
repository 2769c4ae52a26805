"""Folders for mlx_lm: names and shapes of tensors by the rules of each family, the way back, and config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.save import save
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array
from ingot.translate.mlx_config import config_for_mlx
from ingot.translate.mlx_tensors import from_mlx, to_mlx
from ingot.translate.tokenizer_file import why_unreadable
from tests.support import model_folder

LAYER = "model.layers.0."
Shapes = Mapping[str, tuple[int, ...]]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 4, "v_head_dim": 6}
CASES: Mapping[str, tuple[Mapping[str, Any], Shapes, Shapes]] = {
    "experts": (
        {"model_type": "qwen3_moe"},
        {f"{LAYER}mlp.experts.{index}.up_proj.weight": (4, 8) for index in range(3)},
        {f"{LAYER}mlp.switch_mlp.up_proj.weight": (3, 4, 8)},
    ),
    "eleven experts, in the order of their numbers": (
        {"model_type": "mixtral"},
        {f"{LAYER}block_sparse_moe.experts.{index}.w2.weight": (2, 8) for index in reversed(range(11))},
        {f"{LAYER}block_sparse_moe.switch_mlp.down_proj.weight": (11, 2, 8)},
    ),
    "experts in place": (
        {"model_type": "dots1"},
        {f"{LAYER}mlp.experts.{index}.gate_proj.weight": (4, 8) for index in range(2)},
        {f"{LAYER}mlp.experts.gate_proj.weight": (2, 4, 8)},
    ),
    "halves": (
        {"model_type": "granitemoe"},
        {f"{LAYER}block_sparse_moe.input_linear.weight": (2, 6, 8)},
        {f"{LAYER}block_sparse_moe.switch_mlp.{part}_proj.weight": (2, 3, 8) for part in ("gate", "up")},
    ),
    "halves of one matrix": (
        {"model_type": "granitemoehybrid", "num_local_experts": 0},
        {f"{LAYER}shared_mlp.input_linear.weight": (6, 8), f"{LAYER}shared_mlp.output_linear.weight": (8, 3)},
        {f"{LAYER}mlp.gate_proj.weight": (3, 8), f"{LAYER}mlp.up_proj.weight": (3, 8),
         f"{LAYER}mlp.down_proj.weight": (8, 3)},
    ),
    "keys and values": (
        {"model_type": "deepseek_v3", **HEADS},
        {f"{LAYER}self_attn.kv_b_proj.weight": (20, 8)},
        {f"{LAYER}self_attn.embed_q.weight": (2, 8, 4), f"{LAYER}self_attn.unembed_out.weight": (2, 6, 8)},
    ),
    "a convolution, and norms with 1 added": (
        {"model_type": "qwen3_next"},
        {f"{LAYER}linear_attn.conv1d.weight": (6, 1, 4), f"{LAYER}input_layernorm.weight": (8,),
         f"{LAYER}linear_attn.norm.weight": (8,)},
        {f"{LAYER}linear_attn.conv1d.weight": (6, 4, 1), f"{LAYER}input_layernorm.weight": (8,),
         f"{LAYER}linear_attn.norm.weight": (8,)},
    ),
    "transposed": (
        {"model_type": "gpt2"},
        {"transformer.h.0.attn.c_attn.weight": (8, 24), "transformer.wte.weight": (9, 8),
         "transformer.h.0.ln_1.weight": (8,)},
        {"model.h.0.attn.c_attn.weight": (24, 8), "model.wte.weight": (9, 8), "model.h.0.ln_1.weight": (8,)},
    ),
    "other prefixes": (
        {"model_type": "gpt_neox"},
        {"gpt_neox.layers.0.mlp.dense_h_to_4h.weight": (8, 2), "gpt_neox.embed_in.weight": (9, 8),
         "embed_out.weight": (9, 8)},
        {"model.h.0.mlp.dense_h_to_4h.weight": (8, 2), "model.embed_in.weight": (9, 8),
         "model.embed_out.weight": (9, 8)},
    ),
    "a model inside another": (
        {"model_type": "qwen3_5_moe"},
        {"model.language_model.layers.0.mlp.experts.gate_up_proj": (2, 6, 8),
         "model.language_model.layers.0.mlp.experts.down_proj": (2, 8, 3), "lm_head.weight": (9, 8)},
        {"language_model.model.layers.0.mlp.switch_mlp.gate_proj.weight": (2, 3, 8),
         "language_model.model.layers.0.mlp.switch_mlp.up_proj.weight": (2, 3, 8),
         "language_model.model.layers.0.mlp.switch_mlp.down_proj.weight": (2, 8, 3),
         "language_model.lm_head.weight": (9, 8)},
    ),
}  # fmt: skip


def weights_of(shapes: Shapes) -> dict[str, Array]:
    random = np.random.default_rng(3)
    return {name: random.integers(-8, 8, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_a_module_and_back(case: str, tmp_path: Path) -> None:
    config, shapes, expected = CASES[case]
    weights = weights_of(shapes)
    save(tmp_path / "x.safetensors", weights)
    with ingot.open(tmp_path / "x.safetensors") as checkpoint:
        view = to_mlx(checkpoint, config).checkpoint
        assert {name: view[name].shape for name in view} == dict(expected)
        assert {name: view[name].numpy().shape for name in view} == dict(expected)
        again = to_mlx(view, config).checkpoint
        assert set(again) == set(expected)
        back = from_mlx(view, config).checkpoint
        assert set(back) == set(weights)
        assert all(np.array_equal(back[name].numpy(), values) for name, values in weights.items())
        same = from_mlx(checkpoint, config).checkpoint
        assert all(np.array_equal(same[name].numpy(), values) for name, values in weights.items())


def test_values_are_where_mlx_lm_reads_them(tmp_path: Path) -> None:
    config, shapes, _ = CASES["keys and values"]
    weights = weights_of(shapes)
    save(tmp_path / "x.safetensors", weights)
    with ingot.open(tmp_path / "x.safetensors") as checkpoint:
        view = to_mlx(checkpoint, config).checkpoint
        heads = weights[f"{LAYER}self_attn.kv_b_proj.weight"].reshape(2, 10, 8)
        assert np.array_equal(view[f"{LAYER}self_attn.embed_q.weight"].numpy(), heads[:, :4].swapaxes(1, 2))
        assert np.array_equal(view[f"{LAYER}self_attn.unembed_out.weight"].numpy(), heads[:, 4:])
    config, shapes, _ = CASES["a convolution, and norms with 1 added"]
    weights = weights_of(shapes)
    save(tmp_path / "y.safetensors", weights)
    with ingot.open(tmp_path / "y.safetensors") as checkpoint:
        view = to_mlx(checkpoint, config).checkpoint
        norms = [f"{LAYER}{name}.weight" for name in ("input_layernorm", "linear_attn.norm")]
        assert np.array_equal(view[norms[0]].numpy(), weights[norms[0]] + 1)
        assert np.array_equal(view[norms[1]].numpy(), weights[norms[1]])


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("experts", {f"{LAYER}mlp.experts.4.up_proj.weight": (4, 8)}),
        ("halves", {f"{LAYER}block_sparse_moe.input_linear.weight": (2, 5, 8)}),
        ("keys and values", {f"{LAYER}self_attn.kv_b_proj.weight": (21, 8)}),
    ],
)
def test_tensors_of_other_shapes_are_refused(case: str, change: Shapes, tmp_path: Path) -> None:
    config, shapes, _ = CASES[case]
    save(tmp_path / "x.safetensors", weights_of({**shapes, **change}))
    with ingot.open(tmp_path / "x.safetensors") as checkpoint, pytest.raises(UnsupportedError) as caught:
        to_mlx(checkpoint, config)
    assert caught.value.rule == "architecture.rows"


def test_one_half_alone_is_refused_on_the_way_back(tmp_path: Path) -> None:
    config, _, expected = CASES["halves"]
    save(tmp_path / "x.safetensors", weights_of(dict([*expected.items()][:1])))
    with ingot.open(tmp_path / "x.safetensors") as checkpoint, pytest.raises(UnsupportedError, match="up_proj"):
        from_mlx(checkpoint, config)


def test_rotary_parameters_are_those_that_modules_read() -> None:
    flat = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    config = config_for_mlx({"model_type": "llama", "rope_parameters": flat})
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    default = config_for_mlx({"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
    assert default["rope_theta"] == 1e6
    assert "rope_scaling" not in default
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    by_layer = config_for_mlx({"model_type": "gemma3_text", "rope_parameters": layers})
    assert (by_layer["rope_theta"], by_layer["rope_local_base_freq"]) == (1e6, 1e4)
    partial = config_for_mlx(
        {"model_type": "phi", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    )
    assert partial["partial_rotary_factor"] == 0.5


def test_present_keys_are_unchanged() -> None:
    config = {"model_type": "llama", "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config_for_mlx({**config, "rope_parameters": {"rope_theta": 7.0}}) == {
        **config,
        "rope_parameters": {"rope_theta": 7.0},
    }
    assert config_for_mlx(config) == config


def test_a_model_inside_another_gets_its_keys() -> None:
    text = {"model_type": "qwen3_moe", "num_local_experts": 4, "hidden_size": 64, "num_attention_heads": 4}
    config = config_for_mlx({"model_type": "wrapper", "text_config": text})
    assert config["text_config"] == {**text, "num_experts": 4, "head_dim": 16}
    assert config["model_type"] == "wrapper"


def test_a_config_without_keys_that_the_module_needs_is_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in model_folder.CONFIG.items() if key != "rms_norm_eps"}
    source = model_folder.write(tmp_path / "m", config)
    with pytest.raises(UnsupportedError, match="rms_norm_eps") as caught:
        ingot.convert(source, tmp_path / "out", format="mlx")
    assert caught.value.rule == "architecture.config"
    ingot.convert(source, tmp_path / "kept", format="mlx", keep_names=True)


def test_the_config_of_a_folder_has_the_keys(tmp_path: Path) -> None:
    config = {key: value for key, value in model_folder.CONFIG.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    source = model_folder.write(tmp_path / "m", config)
    ingot.convert(source, tmp_path / "out", "mlx-4bit", format="mlx")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == 5e5
    assert written["quantization"]["bits"] == 4


def test_a_family_that_was_not_compared_is_noted(tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", {**model_folder.CONFIG, "model_type": "iquestcoder"})
    report = ingot.convert(source, tmp_path / "out", format="mlx")
    assert any("has not compared" in note for note in report.notes)


def test_a_config_without_the_keys_of_a_module_that_was_not_compared_is_refused(tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", {**model_folder.CONFIG, "model_type": "kimi_linear"})
    with pytest.raises(UnsupportedError, match="linear_attn_config") as caught:
        ingot.convert(source, tmp_path / "out", format="mlx")
    assert caught.value.rule == "architecture.config"
    assert not (tmp_path / "out").exists()


def test_experts_are_stacked_and_packed_by_a_preset(tmp_path: Path) -> None:
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = {
        **model_folder.CONFIG, **sizes, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    weights = {name: value for name, value in model_folder.tensors(norms=True).items() if ".mlp." not in name}
    random = np.random.default_rng(0)
    names = [f"experts.{index}.{part}_proj" for index in range(2) for part in ("gate", "up", "down")]
    weights |= {f"{LAYER}mlp.{name}.weight": random.normal(0, 1, (64, 64)).astype(np.float32) for name in names}
    weights[f"{LAYER}mlp.gate.weight"] = np.ones((2, 64), np.float32)
    source = model_folder.write(tmp_path / "m", config, weights)
    ingot.convert(source, tmp_path / "out", "mlx-4bit", format="mlx")
    with ingot.open(tmp_path / "out") as checkpoint:
        stacked = checkpoint[f"{LAYER}mlp.switch_mlp.up_proj.weight"]
        assert (stacked.codec, stacked.shape) == ("affine", (2, 64, 64))
    for target, format in (("back", "safetensors"), ("back.gguf", None)):
        ingot.convert(tmp_path / "out", tmp_path / target, format=format, recipe="decompress")
    with ingot.open(tmp_path / "back") as back, ingot.open(tmp_path / "back.gguf") as gguf:
        assert set(back) == set(weights)
        error = (
            back[f"{LAYER}mlp.experts.1.up_proj.weight"].numpy("f32") - weights[f"{LAYER}mlp.experts.1.up_proj.weight"]
        )
        assert np.abs(error).max() < 0.4
        assert gguf["blk.0.ffn_up_exps.weight"].shape == (2, 64, 64)


@pytest.mark.parametrize(
    ("section", "component", "message"),
    [
        ("decoder", {"type": "ByteLevel"}, "add_prefix_space"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {}}]}, "behavior"),
        ("normalizer", {"type": "Strip", "strip_left": True}, "strip_right"),
    ],
)
def test_a_tokenizer_that_no_program_reads_is_refused(
    section: str, component: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    words = {**model_folder.tokenizer(), section: component}
    assert message in why_unreadable(words)
    source = model_folder.write(tmp_path / "m", words=words)
    with pytest.raises(UnsupportedError, match=message) as caught:
        ingot.convert(source, tmp_path / "out", format="mlx")
    assert caught.value.rule == "architecture.tokenizer"
    ingot.convert(source, tmp_path / "kept", format="mlx", no_tokenizer=True)
    assert why_unreadable(model_folder.tokenizer()) == ""
