"""Presets for vLLM, read by transformers and compressed-tensors: the values are Ingot's, bit for bit in bf16."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from tests.support.preset_model import statistics, written

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["w4a16", "w4a16-calibrated", "w8a16", "w8a8", "fp8", "nvfp4", "mxfp4"])
def test_transformers_has_the_values(tmp_path: Path, preset: str) -> None:
    source = written(tmp_path / "in", ml_dtypes.bfloat16)
    calibration = statistics() if preset.endswith("-calibrated") else None
    ingot.convert(source, tmp_path / "out", preset, format="compressed-tensors", calibration=calibration)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    values = dict(model.named_parameters())
    with ingot.open(tmp_path / "out") as checkpoint:
        for name in checkpoint:
            theirs = values[name].detach()
            assert theirs.dtype == torch.bfloat16
            expected = checkpoint[name].numpy("bf16").astype(np.float32)
            assert np.array_equal(theirs.float().numpy(), expected), name
        assert sum(checkpoint[name].codec != "dense" for name in checkpoint) == 7
    assert bool(torch.isfinite(model(torch.arange(8)[None]).logits).all())


@pytest.mark.filterwarnings("ignore")
def test_transformers_quantizes_inputs_to_nvfp4(tmp_path: Path) -> None:
    """The package loads the scales of inputs, decodes Ingot's weights, and multiplies by rounded inputs."""
    source = written(tmp_path / "in", ml_dtypes.bfloat16)
    recipe = "nvfp4-w4a4-calibrated"
    ingot.convert(source, tmp_path / "out", recipe, format="compressed-tensors", calibration=statistics())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layer = model.model.layers[0].self_attn.q_proj
    with ingot.open(tmp_path / "out") as checkpoint:
        scale = checkpoint["model.layers.0.self_attn.q_proj.input_global_scale"].numpy()
        weights = torch.from_numpy(checkpoint["model.layers.0.self_attn.q_proj.weight"].numpy("f32", copy=True))
    assert layer.input_global_scale.item() == scale[0]
    inputs = torch.linspace(-2, 2, weights.shape[1], dtype=torch.bfloat16)[None]
    model(torch.arange(8)[None])  # the package decodes the weights when the model first runs
    assert torch.equal(layer.weight.float(), weights.bfloat16().float())
    exact = inputs.float() @ layer.weight.float().T
    error = torch.linalg.norm(layer(inputs).float() - exact) / torch.linalg.norm(exact)
    assert 0.01 < error < 0.3
