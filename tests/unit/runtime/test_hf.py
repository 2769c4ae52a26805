"""``import ingot.hf``: transformers' own from_pretrained and save_pretrained over folders of Ingot's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

import ingot
import ingot.hf
from ingot.errors import UnsupportedError
from ingot.runtime.layers.packed_linear import PackedEmbedding, PackedLinear
from ingot.runtime.loading import transformers_quantizer
from tests.support.models import make, output_of

RULE = 'match = ["*"]\nmin_ndim = 2\ncodec = "affine"\noptions = { bits = 4, group = 16 }'
RECIPE = f'name = "all"\ndescription = "all"\n[[rules]]\nlabel = "all"\n{RULE}\n'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    (root / "all.toml").write_text(RECIPE)
    (root / "zt").mkdir()
    for kind in ("llama", "tied qwen2", "bert"):
        make(kind, root / "plain" / kind, "float32")
        ingot.convert(root / "plain" / kind, root / "zt" / kind, root / "all.toml")
    plain = root / "plain" / "llama"
    wide = make("llama", root / "plain" / "wide", "float32", hidden_size=64, intermediate_size=64)
    ingot.convert(wide, root / "mlx", "mlx-4bit", format="mlx")
    ingot.convert(plain, root / "squizd", root / "all.toml", format="squizd")
    return root


@pytest.mark.parametrize(
    ("name", "auto"),
    [("zt/llama", AutoModelForCausalLM), ("zt/tied qwen2", AutoModelForCausalLM), ("zt/bert", AutoModel)],
)
def test_packed_folders_open_and_are_saved_as_they_are(folders: Path, tmp_path: Path, name: str, auto: object) -> None:
    model = auto.from_pretrained(folders / name)  # type: ignore[attr-defined]
    same = ingot.load_model(folders / name, keep_packed=True)
    assert type(model) is type(same)
    assert any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())
    assert model.is_quantized
    assert torch.equal(output_of(model), output_of(same))
    model.save_pretrained(tmp_path / "copy")
    with ingot.open(folders / name) as old, ingot.open(tmp_path / "copy") as new:
        assert set(new) == set(old)
        for key, tensor in old.items():
            assert new[key].codec == tensor.codec
            assert new[key].layout == tensor.layout
            assert (new[key].numpy() == tensor.numpy()).all()
    again = auto.from_pretrained(tmp_path / "copy")  # type: ignore[attr-defined]
    assert torch.equal(output_of(again), output_of(model))


@pytest.mark.parametrize("name", ["mlx", "squizd"])
def test_other_containers_open(folders: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders / name, dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    wanted = ingot.load_model(folders / name, keep_packed=True, dtype="f32")
    assert torch.equal(output_of(model), output_of(wanted))


def test_the_callers_wishes_count(folders: Path, tmp_path: Path) -> None:
    given = ingot.hf.IngotConfig(keep_packed=False)
    model = AutoModelForCausalLM.from_pretrained(
        folders / "zt" / "llama", quantization_config=given, dtype="bfloat16", attn_implementation="eager"
    )
    assert type(model.lm_head) is torch.nn.Linear
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)  # nothing packed: transformers' own way
    assert (tmp_path / "model.safetensors").exists()
    packed = transformers.LlamaForCausalLM.from_pretrained(folders / "zt" / "llama")
    wanted = output_of(ingot.load_model(folders / "zt" / "llama"))
    plain = packed.dequantize()
    assert type(plain.lm_head) is torch.nn.Linear
    assert torch.equal(output_of(plain), wanted)
    refused = {"device_map": {"model": "cpu", "lm_head": "disk"}}, {"max_memory": {0: "1GB"}}, {"use_cache": False}
    for options in refused:
        with pytest.raises(UnsupportedError) as caught:
            transformers.LlamaForCausalLM.from_pretrained(folders / "zt" / "llama", **options)
        assert caught.value.rule == "model.option"
    with pytest.raises(UnsupportedError) as caught:
        transformers.LlamaForCausalLM.from_pretrained("org/name", revision="v1", quantization_config=given)
    assert caught.value.rule == "model.option"


def test_a_folder_within_another_is_ours_by_what_lies_in_it(folders: Path) -> None:
    root = folders / "zt"
    inner = transformers.LlamaForCausalLM.from_pretrained(root, subfolder="llama", use_kernels=False, revision="v1")
    assert isinstance(inner.lm_head, PackedLinear)
    config = transformers.AutoConfig.from_pretrained(folders / "mlx")
    config.quantization = {"bits": 4}
    transformers.LlamaForCausalLM.from_pretrained(folders / "mlx", config=config)
    assert config.quantization == {"bits": 4}


def test_one_process_of_several_saves(folders: Path, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folders / "zt" / "llama")
    model.save_pretrained(tmp_path / "by-name", is_main_process=False)
    model.save_pretrained(tmp_path / "by-place", False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnsupportedError) as caught:
        model.save_pretrained(tmp_path / "other", True, model.state_dict())
    assert caught.value.rule == "model.option"


def test_other_folders_are_left_to_transformers(folders: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folders / "plain" / "llama")
    assert not hasattr(plain, "hf_quantizer")
    mine = AutoModelForCausalLM.from_pretrained(folders / "plain" / "llama", quantization_config=ingot.hf.IngotConfig())
    assert torch.equal(output_of(plain), output_of(mine))
    with pytest.raises(ValueError, match="config"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


DIALECTS = {
    "gptq": ("affine", 'bits = 4, group = 32, symmetric = true, scales = "f16"'),
    "awq": ("affine", 'bits = 4, group = 32, symmetric = false, scales = "f16"'),
    "compressed-tensors": ("affine", 'bits = 4, group = 32, symmetric = true, scales = "f16"'),
    "fp8": ("scaled_codebook", 'table = "f8_e4m3fn", group = "tensor"'),
    "modelopt": ("scaled_codebook", 'table = "f8_e4m3fn", group = "tensor"'),
}


@pytest.fixture(scope="module")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dialects")
    make("llama", root / "plain", "float16", hidden_size=64, intermediate_size=64)
    (root / "zt").mkdir()
    for name, (codec, options) in DIALECTS.items():
        rule = f'match = "*_proj.weight"\ncodec = "{codec}"\noptions = {{ {options} }}'
        (root / "r.toml").write_text(f'name = "r"\n[[rules]]\n{rule}\n')
        ingot.convert(root / "plain", root / "zt" / name, root / "r.toml", format="zt")
        ingot.convert(root / "zt" / name, root / name, format=name)
    return root


@pytest.mark.parametrize("name", DIALECTS)
def test_folders_of_packages_that_are_not_there_are_ours(
    name: str, dialects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers says: it misses a package, or knows no such packing. What it then says is told, once."""

    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("pip install what-packed-it")

    told: list[str] = []
    monkeypatch.setattr(transformers_quantizer._LOGGER, "warning", lambda *said: told.append(said[0] % said[1:]))
    if name != "modelopt":  # of which transformers has no quantizer
        method = json.loads((dialects / name / "config.json").read_text())["quantization_config"]["quant_method"]
        monkeypatch.setattr(AUTO_QUANTIZER_MAPPING[method], "__init__", missing)
    model = AutoModelForCausalLM.from_pretrained(dialects / name)
    assert len(told) == 1
    assert ("it has no quantizer" in told[0]) == (name == "modelopt")
    assert ("pip install" in told[0]) == (name != "modelopt")
    wanted = output_of(ingot.load_model(dialects / name, keep_packed=True))
    assert torch.equal(output_of(model), wanted)
    model.save_pretrained(tmp_path / "copy")
    assert torch.equal(output_of(AutoModelForCausalLM.from_pretrained(tmp_path / "copy")), wanted)
    asked = AutoModelForCausalLM.from_pretrained(dialects / name, quantization_config=ingot.hf.IngotConfig())
    assert torch.equal(output_of(asked), wanted)
    assert len(told) == 1


def test_folders_whose_package_is_there_are_left_to_it(dialects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for who asks for Ingot."""
    seen: list[object] = []

    class Theirs(HfQuantizer):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: object, **options: object) -> None:
            self.quantization_config = config

        def validate_environment(self, *args: object, **kwargs: object) -> None:
            seen.append(self)

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    def usual(*args: object, **kwargs: object) -> str:
        return "theirs"

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "gptq", Theirs)
    theirs = transformers_quantizer._wrap_from_pretrained(usual)
    assert theirs(transformers.LlamaForCausalLM, dialects / "gptq") == "theirs"
    assert seen
    model = theirs(transformers.LlamaForCausalLM, dialects / "gptq", quantization_config=ingot.hf.IngotConfig())
    assert torch.equal(output_of(model), output_of(ingot.load_model(dialects / "gptq", keep_packed=True)))
