"""Each tensor of a model has a place in the target, is not needed there, or is lost: then nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.matrix import matrix
from ingot.errors import UnsupportedError
from tests.support import model_folder

pytest.importorskip("gguf")

LAYER = "model.layers.0."
ATTENTION = f"{LAYER}self_attn."
ONE = np.float32([0.5])
MASK = np.tril(np.ones((1, 1, 8, 8), np.float32))
FREQUENCIES = (10000.0 ** (-np.arange(0, 16, 2) / 16)).astype(np.float32)
NEEDLESS = {
    f"{ATTENTION}rotary_emb.inv_freq": FREQUENCIES,
    f"{ATTENTION}masked_bias": np.float32(-1e9),
    f"{LAYER}attn.bias": MASK,
    f"{ATTENTION}k_scale": np.float32(0.5),
    f"{ATTENTION}v_scale": ONE,
    f"{ATTENTION}k_proj.k_scale": ONE,
    f"{ATTENTION}v_proj.v_scale": ONE,
    f"{ATTENTION}kv_scale": ONE,
    f"{ATTENTION}q_scale": ONE,
    f"{ATTENTION}prob_scale": ONE,
    f"{ATTENTION}k_proj.output_scale": ONE,
    f"{LAYER}mlp.up_proj.input_scale": np.float32(0.5),
    f"{LAYER}mlp.down_proj.input_global_scale": ONE,
    f"{LAYER}mlp.gate_proj.activation_scale": ONE,
}
LOST = {
    "v_head.summary.weight": np.ones((1, 64), np.float32),
    "score.weight": np.ones((2, 64), np.float32),
    "mtp.fc.weight": np.ones((64, 128), np.float32),
    "model.layers.1.input_layernorm.weight": np.ones(64, np.float32),
    f"{LAYER}self_attn.q_norm.weight": np.ones(16, np.float32),
    f"{LAYER}mlp.unheard_of.input_scale": ONE,
    f"{LAYER}mlp.up_proj.k_scale": ONE,
    f"{LAYER}attn.bias": np.ones(64, np.float32),
    "model.embed_tokens.bias": np.ones(64, np.float32),
}
TARGETS = [("x.gguf", None), ("x", "mlx")]


def with_tensors(path: Path, more: dict[str, Any], **config: Any) -> Path:
    return model_folder.write(path, {**model_folder.CONFIG, **config}, model_folder.tensors() | more)


@pytest.mark.parametrize(("target", "format"), TARGETS)
@pytest.mark.parametrize("name", NEEDLESS)
def test_what_the_program_computes_itself_is_left_out(
    name: str, target: str, format: str | None, tmp_path: Path
) -> None:
    source = with_tensors(tmp_path / "m", {name: NEEDLESS[name]})
    report = ingot.convert(source, tmp_path / target, format=format)
    assert set(report.superseded) == {name}
    assert not report.dropped
    assert any(name in note for note in report.notes)
    with ingot.open(tmp_path / target) as made:
        assert len(made) == len(model_folder.tensors())
    if format is None:
        assert made.metadata["general.architecture"] == "llama"
        assert "blk.0.attn_q.weight" in set(made)


@pytest.mark.parametrize(("target", "format"), TARGETS)
@pytest.mark.parametrize("name", LOST)
def test_what_has_no_place_is_lost(name: str, target: str, format: str | None, tmp_path: Path) -> None:
    if format == "mlx" and name.endswith(("self_attn.q_norm.weight", "embed_tokens.bias")):
        pytest.skip("a module of another family, or a parameter: not looked at for MLX")
    source = with_tensors(tmp_path / "m", {name: LOST[name]})
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / target, format=format)
    assert caught.value.rule == "account.lost"
    assert name in caught.value.message
    ways = matrix(source, to=["mlx" if format else "gguf"]).tensors
    assert [way.name for way in ways if way.action == "refused"] == [name]
    report = ingot.convert(source, tmp_path / target, format=format, drop=[name])
    assert set(report.dropped) == {name}
    assert not report.exact


def test_frequencies_that_the_config_does_not_give_are_lost(tmp_path: Path) -> None:
    name = f"{ATTENTION}rotary_emb.inv_freq"
    source = with_tensors(tmp_path / "m", {name: FREQUENCIES}, rope_theta=500000.0)
    with pytest.raises(UnsupportedError, match="rope_theta 500000"):
        ingot.convert(source, tmp_path / "x.gguf")
    # f16 and another scaling, whose frequencies are computed from it, are no other values
    with_tensors(tmp_path / "half", {name: FREQUENCIES.astype(np.float16)})
    assert set(ingot.convert(tmp_path / "half", tmp_path / "y.gguf").superseded) == {name}


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.up_proj", "input_layernorm"])
def test_a_bias_that_llama_cpp_has_no_place_for_is_lost(module: str, tmp_path: Path) -> None:
    """Its qwen3 has biases of q, k and v alone, its llama of all but norms: it opens no file with another."""
    bias = {f"{LAYER}{module}.bias": np.ones({"mlp.up_proj": 128}.get(module, 64), np.float32)}
    weights = model_folder.tensors(norms=True) | bias
    config = {**model_folder.CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(model_folder.write(tmp_path / "q", config, weights), tmp_path / "x.gguf")
    assert caught.value.rule == "account.lost"
    config = {**model_folder.CONFIG, "attention_bias": True, "mlp_bias": True, "architectures": ["LlamaWithoutSome"]}
    llama = model_folder.write(tmp_path / "l", config, model_folder.tensors() | bias)
    if module == "input_layernorm":
        with pytest.raises(UnsupportedError):
            ingot.convert(llama, tmp_path / "y.gguf")
    else:
        ingot.convert(llama, tmp_path / "y.gguf")


@pytest.mark.parametrize("same", [True, False])
def test_gemma_has_no_head_but_the_embedding(same: bool, tmp_path: Path) -> None:
    weights = model_folder.tensors()
    if same:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    config = {**model_folder.CONFIG, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    source = model_folder.write(tmp_path / "m", config, weights)
    if not same:
        with pytest.raises(UnsupportedError, match=r"lm_head\.weight"):
            ingot.convert(source, tmp_path / "x.gguf")
        return
    assert set(ingot.convert(source, tmp_path / "x.gguf").superseded) == {"lm_head.weight"}
    with ingot.open(tmp_path / "x.gguf") as made:
        assert "output.weight" not in made


def test_a_head_of_other_rows_than_the_embedding_is_refused(tmp_path: Path) -> None:
    source = with_tensors(tmp_path / "m", {"lm_head.weight": np.ones((9, 64), np.float32)})
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "model.shape"
    source = with_tensors(tmp_path / "o", {"lm_head.weight": np.ones((9, 64), np.float32)}, architectures=["Other"])
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.rows"


def mixtral(path: Path, experts: list[int]) -> Path:
    weights = {name: value for name, value in model_folder.tensors().items() if ".mlp." not in name}
    for number in experts:
        for module, shape in (("w1", (128, 64)), ("w2", (64, 128)), ("w3", (128, 64))):
            name = f"{LAYER}block_sparse_moe.experts.{number}.{module}.weight"
            weights[name] = np.full(shape, number, np.float32)
    weights[f"{LAYER}block_sparse_moe.gate.weight"] = np.ones((3, 64), np.float32)
    more = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    return model_folder.write(path, {**model_folder.CONFIG, **more}, weights)


def test_experts_are_stacked_and_none_may_be_missing(tmp_path: Path) -> None:
    ingot.convert(mixtral(tmp_path / "m", [0, 1, 2]), tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as made:
        assert made["blk.0.ffn_down_exps.weight"].numpy()[:, 0, 0].tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedError, match="but 1 is missing") as caught:
        ingot.convert(mixtral(tmp_path / "n", [0, 2]), tmp_path / "y.gguf")
    assert caught.value.rule == "architecture.rows"


def test_tensors_that_transformers_has_not_are_lost(tmp_path: Path) -> None:
    ingot.convert(model_folder.write(tmp_path / "m"), tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        more = {"blk.0.attn_sub_norm.weight": np.ones(64, np.float32)}
        ingot.save(tmp_path / "y.gguf", {**checkpoint, **more}, checkpoint.metadata)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert caught.value.rule == "account.lost"
    report = ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors", drop=["*sub_norm*"])
    assert set(report.dropped) == {"blk.0.attn_sub_norm.weight"}
    with ingot.open(tmp_path / "back") as made:
        assert set(made) == set(model_folder.tensors())
