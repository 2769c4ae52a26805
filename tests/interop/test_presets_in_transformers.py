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
