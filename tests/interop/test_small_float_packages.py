"""Small floats with scales, against the programs that compute with them: MLX, transformers, torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.codecs.scaled_codebook.codec import ScaledCodebookCodec
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import encode_tensor

CODEC = ScaledCodebookCodec()
MODES = {
    "mxfp4": {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"},
    "mxfp8": {"table": "f8_e4m3fn", "group": 32, "scales": "f8_e8m0fnu"},
    "nvfp4": {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn"},
}


def folder(path: Path, tensors: dict[str, Array], config: dict[str, Any]) -> Path:
    path.mkdir()
    ingot.save(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def words(tensor: Tensor) -> tuple[Array, Array]:
    packed = np.frombuffer(tensor.parts["indices"].view(), np.uint32)
    return packed.reshape(len(tensor.numpy()), -1), tensor.parts["scales"].array().reshape(len(tensor.numpy()), -1)


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_mlx(mode: str, tmp_path: Path) -> None:
    """MLX finds our values in our words, and Ingot its values in its own, to the last bit in f32."""
    mx = pytest.importorskip("mlx.core")

    def decoded(packed: Array, scales: Array) -> Array:
        return np.array(mx.dequantize(mx.array(packed), mx.array(scales), mode=mode, dtype=mx.float32))

    values = np.random.default_rng(4).normal(0, 1, (6, 128)).astype(np.float32)
    ours = encode_tensor(CODEC, values, MODES[mode], dtype="f32")
    assert np.array_equal(decoded(*words(ours)), ours.numpy())
    packed, scales = (np.array(item) for item in mx.quantize(mx.array(values), mode=mode))
    keys = {"group_size": MODES[mode]["group"], "bits": 8 if mode == "mxfp8" else 4, "mode": mode}
    path = folder(tmp_path / "mlx", {"l.weight": packed, "l.scales": scales}, {"quantization": keys})
    with ingot.open(path) as checkpoint:
        assert checkpoint.format == "mlx"
        assert np.array_equal(checkpoint["l.weight"].numpy("f32"), decoded(packed, scales))
    ingot.convert(path, tmp_path / "moved.zt")
    ingot.convert(tmp_path / "moved.zt", tmp_path / "back", format="mlx", keep_names=True)
    stored = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "back" / "model.safetensors")
    assert np.array_equal(stored["l.weight"], packed)
    assert np.array_equal(stored["l.scales"], scales)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization"] == keys


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """transformers' own decoder gives the same values, in the same orientation."""
    torch = pytest.importorskip("torch")
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(6)
    blocks, scales = rng.integers(0, 256, (3, 10, 2, 16), np.uint8), rng.integers(90, 140, (3, 10, 2), np.uint8)
    wanted = integration.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16)
    config = {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    path = folder(tmp_path / "theirs", tensors, config)
    with ingot.open(path) as checkpoint:
        found = checkpoint["e.down_proj"].numpy("bf16")
        assert found.shape == tuple(wanted.shape)
        assert found.tobytes() == wanted.contiguous().view(torch.uint16).numpy().tobytes()
    ingot.convert(path, tmp_path / "moved.zt")
    ingot.convert(tmp_path / "moved.zt", tmp_path / "back", format="mxfp4")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_blocks_of_fp8_are_torchs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(8).normal(0, 0.1, (200, 130)).astype(ml_dtypes.bfloat16)
    tensor = encode_tensor(CODEC, values, {"table": "f8_e4m3fn", "group": [128, 128]}, dtype="bf16")
    ingot.save(tmp_path / "one.zt", {"l.weight": tensor, "norm": np.ones(3, ml_dtypes.bfloat16)})
    ingot.convert(tmp_path / "one.zt", tmp_path / "fp8", format="fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    stored = pytest.importorskip("safetensors.torch").load_file(tmp_path / "fp8" / "model.safetensors")
    scale = stored["l.weight_scale_inv"].repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    wide = (torch.tensor(values.astype(np.float32)) / scale).clamp(-448, 448)
    assert torch.equal(wide.to(torch.float8_e4m3fn).float(), stored["l.weight"].float())
    wanted = (stored["l.weight"].float() * scale).to(torch.bfloat16)
    with ingot.open(tmp_path / "fp8") as checkpoint:
        assert torch.equal(checkpoint["l.weight"].torch("bf16"), wanted)
