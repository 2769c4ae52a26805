"""Tiny models of transformers' classes become GGUF files with the names of the package gguf, and come back.

`make families` compares all of them with llama.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.translate.families import FAMILIES, refusal_reasons
from ingot.translate.unsupported_families import unknown_gguf_names
from tests.support import model_folder
from tests.support.tiny_models import SETTINGS, write_model
from tests.support.tiny_wrappers import WRAPPERS

gguf = pytest.importorskip("gguf")
torch: Any = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FEW = (
    "gpt2",
    "gpt_neox",
    "stablelm",
    "granitemoehybrid",
    "mamba2",
    "lfm2_moe",
    "ernie4_5_moe",
    "apertus",
    "qwen3_5_text",
)
"""Families whose records together use every transform that a record uses."""
ROUNDED = (".A_log", "norm.weight")


def values(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy() for name, tensor in checkpoint.items()}


def test_each_family_has_a_tiny_model() -> None:
    inner = {name for name, family in FAMILIES.items() if family.plain}
    assert set(SETTINGS) | inner == set(FAMILIES)
    assert inner == {f"{name}_text" for name in WRAPPERS if "_vl" in name and "qwen" in name}
    assert not set(refusal_reasons()) & set(FAMILIES)


def test_the_few_families_use_every_transform() -> None:
    used = {step.transform for family in FAMILIES.values() for step in family.steps}
    assert used == {step.transform for name in FEW for step in FAMILIES[name].steps}


@pytest.mark.parametrize("model_type", FEW)
def test_a_family_has_the_names_of_the_package_and_comes_back(model_type: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.metadata["general.architecture"] == FAMILIES[model_type].arch
        assert not unknown_gguf_names(checkpoint.metadata, checkpoint)
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    before, after = values(tmp_path / "m"), values(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, array in before.items():
        if name.endswith(ROUNDED):
            assert np.allclose(after[name], array, rtol=0, atol=1e-6)
        else:
            assert np.array_equal(after[name], array), name


def test_packed_rows_splits_and_stacks_are_moved_without_decoding(tmp_path: Path) -> None:
    write_model("granitemoe", tmp_path / "m")
    options = '{ bits = 4, group = 32, scales = "f16", signed = false, zero_point = 8 }'
    rule = f'match = ["*_proj.weight", "*_linear.weight"]\ncodec = "affine"\noptions = {options}'
    (tmp_path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(tmp_path / "m", tmp_path / "q", tmp_path / "r.toml", format="zt")
    report = ingot.convert(tmp_path / "q", tmp_path / "x.gguf")
    assert "decoded" not in report.actions
    with ingot.open(tmp_path / "q") as packed, ingot.open(tmp_path / "x.gguf") as file:
        experts = packed["model.layers.0.block_sparse_moe.input_linear.weight"].numpy("f32")
        gate = file["blk.0.ffn_gate_exps.weight"]
        assert gate.codec == "ggml_blocks"
        assert np.array_equal(gate.numpy("f32"), experts[:, : experts.shape[1] // 2])


def test_a_setting_that_llama_cpp_does_not_compute_is_refused(tmp_path: Path) -> None:
    write_model("olmoe", tmp_path / "m")
    config = (tmp_path / "m" / "config.json").read_text()
    (tmp_path / "m" / "config.json").write_text(config.replace('"num_key_value_heads": 4', '"num_key_value_heads": 2'))
    with pytest.raises(UnsupportedError, match="num_key_value_heads") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.config"
    assert not (tmp_path / "x.gguf").exists()


def test_a_family_is_refused_with_its_reason(tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", {**model_folder.CONFIG, "model_type": "phimoe"})
    with pytest.raises(UnsupportedError, match="sparse mixer") as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.unknown"


def test_a_file_that_lacks_settings_is_refused_on_the_way_back(tmp_path: Path) -> None:
    write_model("mamba", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        metadata = {key: value for key, value in checkpoint.metadata.items() if "companion" not in key}
        ingot.save(tmp_path / "y.gguf", dict(checkpoint), metadata)
    with pytest.raises(UnsupportedError, match=r"config\.json") as caught:
        ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert caught.value.rule == "architecture.unknown"


@pytest.mark.parametrize(
    ("model_type", "absent"),
    [
        ("gpt_neox", "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"),
        ("gpt_neox", "gpt_neox.embed_in.weight"),
        ("lfm2_moe", "model.embedding_norm.weight"),
    ],
)
def test_a_model_that_lacks_a_tensor_is_refused(model_type: str, absent: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "m")
    tensors = {name: array for name, array in values(tmp_path / "m").items() if name != absent}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    with pytest.raises(UnsupportedError, match=absent) as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "model.missing-tensor"
    assert not (tmp_path / "x.gguf").exists()


def test_a_model_that_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    write_model("mamba2", tmp_path / "m")
    tensors = {name: array for name, array in values(tmp_path / "m").items() if ".layers.1." not in name}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    with pytest.raises(UnsupportedError, match=r"backbone\.layers\.1\.") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "model.missing-tensor"


def test_a_file_of_distilbert_without_its_config_is_not_taken_for_bert(tmp_path: Path) -> None:
    write_model("distilbert", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "bert")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "ingot.", "general.architecture")) and field.types:
            element = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="token_type_embeddings"):
        ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")


@pytest.mark.parametrize(
    ("model_type", "ending"),
    [
        ("gpt_neox", "mlp.dense_4h_to_h.weight"),
        ("olmo2", "mlp.down_proj.weight"),
        ("olmo2", "self_attn.v_proj.weight"),
        ("minimax_m2", ".w2.weight"),
        ("lfm2", "feed_forward.w2.weight"),
        ("smollm3", "self_attn.o_proj.weight"),
    ],
)
def test_a_model_whose_layers_all_lack_a_module_is_refused(model_type: str, ending: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "m")
    tensors = {name: array for name, array in values(tmp_path / "m").items() if not name.endswith(ending)}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    with pytest.raises(UnsupportedError, match=ending.rpartition(".")[0]) as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "model.missing-tensor"


def test_a_layer_without_any_attention_is_refused(tmp_path: Path) -> None:
    write_model("olmo2", tmp_path / "m")
    tensors = {name: array for name, array in values(tmp_path / "m").items() if "self_attn" not in name}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    with pytest.raises(UnsupportedError, match=r"layers\.\*\.self_attn\.k_proj") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "model.missing-tensor"


def without_config(source: Path, target: Path, **changes: Any) -> Path:
    """Write a GGUF file without the folder's files in it, as other programs write it, and return its path."""
    with ingot.open(source) as checkpoint:
        metadata = {key: value for key, value in checkpoint.metadata.items() if not key.startswith("ingot.")}
        ingot.save(target, dict(checkpoint), {**metadata, **changes})
    return target


@pytest.mark.parametrize(("pretokenizer", "model_type"), [("glm4", "glm4_moe_lite"), ("qwen2", "deepseek_v3")])
def test_the_pre_tokenizer_distinguishes_glm_from_deepseek(pretokenizer: str, model_type: str, tmp_path: Path) -> None:
    logits = outputs(write_model("glm4_moe_lite", tmp_path / "m"))
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    file = without_config(tmp_path / "x.gguf", tmp_path / "y.gguf", **{"tokenizer.ggml.pre": pretokenizer})
    ingot.convert(file, tmp_path / "back", format="safetensors")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == model_type
    assert ("mlp_layer_types" in config) == (model_type == "glm4_moe_lite")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert np.array_equal(outputs(back), logits)


def outputs(model: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([[5, 9, 2, 30, 11, 7]])).logits[0].numpy()


DENSE, SPARSE = "dense", "sparse"


@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "exaone_moe"])
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"first_k_dense_replace": 1}, 1),
        ({"mlp_layer_types": [DENSE, SPARSE]}, 1),
        ({"mlp_layer_types": [DENSE, SPARSE], "first_k_dense_replace": 0}, 1),
        ({}, 1),
        ({"mlp_layer_types": [SPARSE, SPARSE]}, None),
        ({"mlp_layer_types": [SPARSE, DENSE]}, None),
        ({"mlp_layer_types": [DENSE, DENSE], "first_k_dense_replace": 1}, None),
        ({"first_k_dense_replace": 0}, None),
        ({"first_k_dense_replace": 2}, None),
    ],
)
def test_dense_layers_are_counted(model_type: str, settings: Any, count: int | None, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    layers = config["num_hidden_layers"]
    settings = {
        key: value[:1] + value[1:] * (layers - 1) if key[0] == "m" else value for key, value in settings.items()
    }
    config = {key: value for key, value in config.items() if key not in ("mlp_layer_types", "first_k_dense_replace")}
    path.write_text(json.dumps(config | settings))
    if count is None:
        with pytest.raises(UnsupportedError, match="experts") as caught:
            ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
        assert caught.value.rule == "architecture.config"
        return
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.metadata[f"{FAMILIES[model_type].arch}.leading_dense_block_count"] == count
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: back.get(key) for key in config} == config
    assert back.get("mlp_layer_types") == settings.get("mlp_layer_types")
