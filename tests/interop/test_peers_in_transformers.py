"""Folders of ours in transformers, unpacked by the packages that packed such ones: `make peers` installs these.

compressed-tensors makes dense weights of its layers on a CPU, so logits are equal bit for bit. bitsandbytes does so
while a model is trained; else it multiplies with codes in kernels of its own, which round otherwise, and want rows that
blocks of 64 divide.

transformers 5.23 loads no layer with zero points of compressed-tensors 0.20, whoever wrote it: it expects them
unpacked. The package itself unpacks ours.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ingot
from ingot.runtime.loading.transformers import load_model

pytestmark = pytest.mark.skipif(not os.environ.get("INGOT_PEERS"), reason="INGOT_PEERS is not set: make peers")
TOKENS = torch.arange(3, 60)[None]
RULES = {
    "int4": ("affine", 'bits = 4, group = 32, symmetric = true, scales = "bf16"'),
    "zero points": ("affine", 'bits = 4, group = 128, symmetric = false, scales = "bf16"'),
    "int8": ("affine", 'bits = 8, group = "row", symmetric = true, scales = "bf16"'),
    "int8 zero points": ("affine", 'bits = 8, group = "row", symmetric = false, scales = "bf16"'),
    "uneven groups": ("affine", 'bits = 4, group = 192, symmetric = true, scales = "bf16"'),
    "fp8": ("scaled_codebook", 'table = "f8_e4m3fn", group = [128, 128]'),
    "fp8 whole": ("scaled_codebook", 'table = "f8_e4m3fn", group = "tensor"'),
    "fp8 powers": ("scaled_codebook", 'table = "f8_e4m3fn", group = [128, 128], scales = "f8_e8m0fnu"'),
    "mxfp4": ("scaled_codebook", 'table = "f4_e2m1fn", group = 32, scales = "f8_e8m0fnu"'),
    "nvfp4": ("scaled_codebook", 'table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "divide"'),
    "nf4": ("scaled_codebook", 'table = "nf4", group = 64, flat = true, order = "high_first"'),
}
ROUNDED = 'scales = "bf16"'  # transformers rounds scales to the model's type


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, dtype="bfloat16",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def packed(model: Path, folder: Path, rule: str, format: str, more: str = "") -> Path:
    """Write a folder in which every matrix of the layers is packed, and none is decoded on the way."""
    codec, options = RULES[rule]
    rule = f'codec = "{codec}"\noptions = {{ {", ".join(filter(None, (options, more)))} }}'
    head = 'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\nmatch = ["*_proj.weight"]\n'
    (folder / "r.toml").write_text(head + rule + "\n")
    ingot.convert(model, folder / "zt", folder / "r.toml", format="zt")
    report = ingot.convert(folder / "zt", folder / "out", format=format)
    assert "decoded" not in report.actions
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == format
    return folder / "out"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(TOKENS).logits.float()
    return found


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("rule", ["int4", "uneven groups", "int8", "fp8", "mxfp4", "nvfp4"])
def test_compressed_tensors(rule: str, model: Path, tmp_path: Path) -> None:
    folder = packed(model, tmp_path, rule, "compressed-tensors", ROUNDED if rule == "fp8" else "")
    peer = loaded(folder)
    assert any(name.endswith(("up_proj.weight_packed", "up_proj.weight_scale")) for name, _ in peer.named_parameters())
    found, wanted = logits(peer), logits(load_model(folder))
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted, logits(loaded(model)))


@pytest.mark.parametrize("rule", ["fp8", "fp8 whole", "fp8 powers"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers, that there is no GPU
def test_fp8(rule: str, model: Path, tmp_path: Path) -> None:
    """Decoded by transformers as it loads them, for there is no GPU."""
    folder = packed(model, tmp_path, rule, "fp8")
    assert torch.equal(logits(loaded(folder)), logits(load_model(folder)))
    assert not torch.equal(logits(load_model(folder)), logits(loaded(model)))


@pytest.mark.parametrize(("rule", "format"), [("int4", "compressed-tensors"), ("fp8", "fp8"), ("nf4", "bitsandbytes")])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tied_heads(rule: str, format: str, model: Path, tmp_path: Path) -> None:
    """A head without weights of its own is no packed layer: it would be one with scales that are not there."""
    config = transformers.AutoConfig.from_pretrained(model, tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "tied")
    folder = packed(tmp_path / "tied", tmp_path, rule, format)
    peer = loaded(folder)
    assert torch.equal(logits(peer.train()), logits(load_model(folder)))


@pytest.mark.parametrize(
    "rule", ["int4", "zero points", "uneven groups", "int8", "int8 zero points", "fp8", "mxfp4", "nvfp4"]
)
def test_compressed_tensors_unpacks_what_we_packed(rule: str, model: Path, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    folder = packed(model, tmp_path, rule, "compressed-tensors")
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(stated).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or stated["format"])
    entries = load_file(folder / "model.safetensors")
    with ingot.open(folder) as checkpoint:
        for name in [name for name, tensor in checkpoint.items() if tensor.codec != "dense"]:
            layer = name.removesuffix("weight")
            held = {key.removeprefix(layer): value for key, value in entries.items() if key.startswith(layer)}
            found = compressor.decompress(held, scheme)["weight"]
            assert torch.equal(found.bfloat16(), checkpoint[name].torch()), name


def require_equal_weights(peer: Any, folder: Path) -> None:
    """What bitsandbytes decodes of each layer is what Ingot reads."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    layers = {name: module for name, module in peer.named_modules() if isinstance(module, Linear4bit)}
    assert len(layers) == 14
    with ingot.open(folder) as checkpoint:
        for name, module in layers.items():
            tensor = checkpoint[f"{name}.weight"]
            assert tensor.codec == "scaled_codebook"
            found = dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(found, tensor.torch()), name


def test_bitsandbytes(model: Path, tmp_path: Path) -> None:
    folder = packed(model, tmp_path, "nf4", "bitsandbytes")
    peer = loaded(folder)
    require_equal_weights(peer, folder)
    wanted = logits(load_model(folder))
    assert torch.equal(logits(peer.train()), wanted)
    assert float((logits(peer.eval()) - wanted).square().mean().sqrt()) < 0.05 * float(wanted.std())
    assert float((logits(loaded(model)) - wanted).square().mean().sqrt()) > 0.1 * float(wanted.std())


def test_what_transformers_writes_by_bitsandbytes_opens(model: Path, tmp_path: Path) -> None:
    """Doubly quantized, as most folders are."""
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(model, quantization_config=how)
    peer.save_pretrained(tmp_path / "theirs")
    require_equal_weights(peer, tmp_path / "theirs")


@pytest.mark.parametrize(("rule", "format"), [("int4", "compressed-tensors"), ("nf4", "bitsandbytes")])
def test_packages_that_are_there_stay_in_charge(rule: str, format: str, model: Path, tmp_path: Path) -> None:
    """Of folders that ``ingot.hf`` would open where they are not."""
    import ingot.hf

    folder = packed(model, tmp_path, rule, format)
    assert type(loaded(folder).hf_quantizer).__module__.startswith("transformers.")
    asked = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=ingot.hf.IngotConfig())
    assert torch.equal(logits(asked), logits(load_model(folder, keep_packed=True)))
