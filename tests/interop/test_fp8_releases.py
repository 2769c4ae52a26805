"""FP8 folders with a scale per block of 128 x 128, as Qwen3-FP8 and MiniMax-M2, become GGUF files in one step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UsageError
from tests.support import tiny_models

pytest.importorskip("gguf")
torch: Any = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

BLOCK, MAXIMUM = 128, 448.0
UNPACKED: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("lm_head", "embed_tokens"),
    "qwen3_moe": ("lm_head", "embed_tokens", "mlp.gate."),
    "minimax_m2": ("lm_head", "embed_tokens", "block_sparse_moe.gate"),
    "glm4_moe": ("lm_head", "embed_tokens", "mlp.gate."),
}
"""Parts of the names of matrices that a release leaves in bf16."""


def quantize(matrix: Any, scale_dtype: Any) -> tuple[Any, Any, Any]:
    """Return the f8_e4m3fn values of a matrix, the scales of its blocks, and the product in f32."""
    rows, columns = matrix.shape
    tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(tall * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(tall, BLOCK, wide, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / MAXIMUM).to(scale_dtype)
    factors = scales.float()[:, None, :, None]
    values = (blocks / factors).clamp(-MAXIMUM, MAXIMUM).to(torch.float8_e4m3fn)

    def cut(array: Any) -> Any:
        return array.reshape(padded.shape)[:rows, :columns].contiguous()

    return cut(values), scales, cut(values.float() * factors)


def write_release(model_type: str, path: Path, scale_dtype: Any, **sizes: int) -> tuple[Path, Path]:
    """Write a tiny FP8 release, and a folder with its values in bf16; return their paths."""
    settings = {**tiny_models.SETTINGS[model_type], **sizes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "SETTINGS", {model_type: settings})
        tiny_models.write_model(model_type, path / "original")
    packed, dense = {}, {}
    for name, values in safetensors_torch.load_file(path / "original" / "model.safetensors").items():
        if values.ndim != 2 or any(part in name for part in UNPACKED[model_type]):
            packed[name] = values.bfloat16()
            dense[name] = packed[name]
        else:
            packed[name], packed[f"{name}_scale_inv"], exact = quantize(values, scale_dtype)
            dense[name] = exact.bfloat16()
    config = json.loads((path / "original" / "config.json").read_text())
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [part.strip(".") for part in UNPACKED[model_type]],
    }  # fmt: skip
    for folder, tensors, more in (
        ("release", packed, {"quantization_config": quantization}),
        ("dense", dense, {}),
    ):
        shutil.copytree(path / "original", path / folder, ignore=shutil.ignore_patterns("*.safetensors"))
        safetensors_torch.save_file(tensors, path / folder / "model.safetensors", {"format": "pt"})
        (path / folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **more}))
    return path / "release", path / "dense"


def read(path: Path) -> dict[str, tuple[str, Any]]:
    with ingot.open(path) as checkpoint:
        return {
            name: (tensor.dtype, torch.from_numpy(tensor.numpy("f32").copy())) for name, tensor in checkpoint.items()
        }


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", UNPACKED)
def test_an_fp8_release_gives_the_file_of_a_dense_copy(model_type: str, scale_dtype: Any, tmp_path: Path) -> None:
    release, dense = write_release(
        model_type, tmp_path, scale_dtype, hidden_size=192, intermediate_size=160, moe_intermediate_size=160
    )
    with ingot.open(release) as checkpoint:
        assert any(tensor.codec == "scaled_codebook" for tensor in checkpoint.values())
    for recipe in (None, "f16", "q4_0"):
        for folder in (release, dense):
            ingot.convert(folder, tmp_path / f"{folder.name}.gguf", recipe, allow_requantize=True, overwrite=True)
        result, expected = read(tmp_path / "release.gguf"), read(tmp_path / "dense.gguf")
        assert result.keys() == expected.keys()
        for name, (dtype, values) in expected.items():
            assert result[name][0] == dtype
            assert torch.equal(result[name][1], values), name
    with pytest.raises(UsageError, match="already stored") as caught:
        ingot.convert(release, tmp_path / "x.gguf", "q4_0")
    assert caught.value.rule == "convert.requantize"


@pytest.mark.parametrize("model_type", UNPACKED)
def test_the_values_of_an_fp8_release_come_back_in_bf16(model_type: str, tmp_path: Path) -> None:
    release, dense = write_release(model_type, tmp_path, torch.float32)
    ingot.convert(release, tmp_path / "x.gguf")
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    result, expected = read(tmp_path / "back"), read(dense)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name][1], values) for name, (_, values) in expected.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((dense / "config.json").read_text())


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    release, _ = write_release("qwen3", tmp_path, torch.float32, hidden_size=256, intermediate_size=384)
    ingot.convert(release, tmp_path / "x.gguf")
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        release, quantization_config=settings, dtype=torch.bfloat16
    )
    with ingot.open(tmp_path / "back") as checkpoint:
        for name, values in model.state_dict().items():
            assert np.array_equal(checkpoint[name].numpy("f32"), values.float().numpy()), name
