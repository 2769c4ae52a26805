"""The text models of transformers' models of several parts become GGUF files that compute the same.

`make families` compares them with llama.cpp too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.translate.families import FAMILIES
from ingot.translate.text_models import omitted_keys
from tests.support.tiny_wrappers import OTHER_PARTS, WRAPPERS, write_wrapper

pytest.importorskip("gguf")
torch: Any = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FAST = ("qwen2_5_vl", "qwen3_vl_moe", "gemma3")
PARTS = {"qwen2_5_vl": ["visual.*"], "qwen3_vl_moe": ["model.visual.*"]}


def outputs(model: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([[5, 9, 2, 30, 11, 7, 40, 200]])).logits[0].numpy()


def values(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy() for name, tensor in checkpoint.items()}


def rewrite(folder: Path, change: Any, new_tensors: Any = None) -> None:
    """Change a folder's ``config.json`` in place, and its tensors."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    if new_tensors is not None:
        tensors = new_tensors(values(folder))
        ingot.save(folder / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)


@pytest.mark.parametrize(
    "model_type", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in WRAPPERS if name not in FAST)]
)
def test_the_text_model_computes_the_same(model_type: str, tmp_path: Path) -> None:
    model = write_wrapper(model_type, tmp_path / "m")
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "account.lost"
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=PARTS.get(model_type, list(OTHER_PARTS)))
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert np.allclose(outputs(back), outputs(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("theta", [None, 10000.0])
def test_a_flat_config_is_that_of_the_text_model(theta: float | None, tmp_path: Path) -> None:
    write_wrapper("qwen2_5_vl", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["visual.*"])

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        text |= {"rope_scaling": {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}}
        config |= {"rope_theta": theta} if theta else {}
        config |= {**text, "model_type": config["model_type"]}

    rewrite(tmp_path / "m", flatten)
    report = ingot.convert(tmp_path / "m", tmp_path / "y.gguf", drop=["visual.*"])
    assert not [note for note in report.notes if "not carried over" in note]
    with ingot.open(tmp_path / "x.gguf") as nested, ingot.open(tmp_path / "y.gguf") as flat:
        expected = {key: value for key, value in nested.metadata.items() if "companion" not in key}
        result = {key: value for key, value in flat.metadata.items() if "companion" not in key}
        assert result.pop("qwen2vl.rope.freq_base") == (theta or 1e6)
        assert expected.pop("qwen2vl.rope.freq_base") == 10000.0
        assert result == expected
        assert result["qwen2vl.rope.dimension_sections"] == [3, 3, 2, 0]


@pytest.mark.parametrize(("layers", "count"), [([0, 1], 2), ([], 0), (None, 3)])
def test_the_count_of_deep_layers_comes_from_the_vision_config(layers: Any, count: int, tmp_path: Path) -> None:
    write_wrapper("qwen3_vl", tmp_path / "m")

    def change(config: dict[str, Any]) -> None:
        del config["vision_config"]["deepstack_visual_indexes"]
        config["vision_config"] |= {} if layers is None else {"deepstack_visual_indexes": layers}

    rewrite(tmp_path / "m", change)
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["model.visual.*"])
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.metadata["qwen3vl.n_deepstack_layers"] == count


@pytest.mark.parametrize("inner", [32, 48, 64])
def test_experts_in_either_order_of_dimensions_give_the_same_file(inner: int, tmp_path: Path) -> None:
    write_wrapper("qwen3_vl_moe", tmp_path / "m", moe_intermediate_size=inner)
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["model.visual.*"])

    def transposed(tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            name: np.ascontiguousarray(array.swapaxes(1, 2)) if ".experts." in name else array
            for name, array in tensors.items()
        }

    rewrite(tmp_path / "m", lambda config: None, transposed)
    ingot.convert(tmp_path / "m", tmp_path / "y.gguf", drop=["model.visual.*"])
    expected, result = values(tmp_path / "x.gguf"), values(tmp_path / "y.gguf")
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[name], array) for name, array in expected.items())


def test_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_wrapper("qwen3_vl_moe", tmp_path / "m")
    rewrite(tmp_path / "m", lambda config: config["text_config"].update(moe_intermediate_size=24))
    with pytest.raises(UnsupportedError, match="expected experts") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["model.visual.*"])
    assert caught.value.rule == "architecture.rows"


@pytest.mark.parametrize(
    "absent", ["layers.1.mlp.experts.down_proj", "layers.0.self_attn.v_proj.weight", "norm.weight"]
)
def test_a_text_model_that_lacks_a_tensor_is_refused(absent: str, tmp_path: Path) -> None:
    write_wrapper("qwen3_vl_moe", tmp_path / "m")
    name = f"model.language_model.{absent}"
    rewrite(tmp_path / "m", lambda config: None, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(UnsupportedError, match=absent.rpartition(".")[0]):
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["model.visual.*"])
    assert not (tmp_path / "x.gguf").exists()


def test_keys_that_a_text_config_omits_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """transformers 4 leaves keys with default values out of ``text_config``, as in Gemma 3's files."""
    write_wrapper(
        "gemma3", tmp_path / "m", num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        max_position_embeddings=131072, query_pre_attn_scalar=256,
    )  # fmt: skip
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=list(OTHER_PARTS))

    def shorten(config: dict[str, Any]) -> None:
        stated_keys = ("hidden_size", "intermediate_size", "model_type", "num_hidden_layers", "sliding_window")
        config["text_config"] = {key: config["text_config"][key] for key in stated_keys}

    rewrite(tmp_path / "m", shorten)
    report = ingot.convert(tmp_path / "m", tmp_path / "y.gguf", drop=list(OTHER_PARTS))
    assert any("head_dim 256" in note for note in report.notes)
    with ingot.open(tmp_path / "x.gguf") as before, ingot.open(tmp_path / "y.gguf") as after:
        expected = {key: value for key, value in before.metadata.items() if key.startswith("gemma3.")}
        assert {key: value for key, value in after.metadata.items() if key.startswith("gemma3.")} == {
            key: value for key, value in expected.items() if key != "gemma3.rope.freq_base_swa"
        }


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2_vl_text", "qwen3_5_moe_text", "llama4_text"])
def test_the_defaults_are_those_of_transformers(model_type: str) -> None:
    config_class = type(transformers.AutoConfig.for_model(model_type))
    config = config_class().to_dict()
    omitted = omitted_keys({}, FAMILIES[model_type])
    assert omitted["num_attention_heads"]
    omitted.pop("sliding_window", None)  # Qwen's classes set it to None if use_sliding_window is false
    assert {key: config[key] for key in omitted} == omitted


def test_the_family_of_a_folder_without_a_class_is_named(tmp_path: Path) -> None:
    write_wrapper("qwen3_vl", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["model.visual.*"])
    report = ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert any("the folder is qwen3" in note for note in report.notes)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "mrope_section" not in config["rope_parameters"]


@pytest.mark.parametrize(("sections", "is_noted"), [([2, 3, 3], True), ([3, 3, 2], False), ([2, 3, 2], True)])
def test_frequencies_that_llama_cpp_does_not_rotate_are_named(sections: Any, is_noted: bool, tmp_path: Path) -> None:
    """llama.cpp takes the positions of Qwen3's frequencies in turn, and uses 0 beyond a section."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    write_wrapper("qwen3_vl", tmp_path / "m", rope_parameters=rope)
    report = ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=["model.visual.*"])
    assert any("mrope_section" in note for note in report.notes) == is_noted
