"""Results of ``ingot quantize`` in the packages that read them: mlx_lm computes, and gguf decodes, Ingot's values.

`make clients` runs whole programs; these are the programs that the tests' venv has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.translate.expected import expected_tensors
from tests.support import model_folder

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
"""Columns that 256 divides, so that every block type of ggml fits."""
TOKENS = [5, 9, 2, 30, 11, 7, 40, 200, 256, 31, 77, 3, 150, 99, 8, 61]
MLX = ["mlx-4bit", "mlx-mxfp4", "mlx-nvfp4"]
GGUF = {"Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "IQ4_XS": "IQ4_XS", "IQ2_XS": "IQ2_XS"}
"""Presets, each with a block type that its file must have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**model_folder.CONFIG, **SIZES}
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in (expected_tensors(config) or {}).items():
        values = random.standard_normal(shape).astype(np.float32)
        weights[name] = values * np.float32(0.1) if len(shape) > 1 else np.ones(shape, np.float32)
    return model_folder.write(tmp_path_factory.mktemp("model") / "m", config, weights)


def quantized(model: Path, out: Path, runtime: str, preset: str) -> Path:
    options = ["--for", runtime, "--preset", preset, "--calibration", "none"]
    assert run(["quantize", str(model), "-o", str(out), *options]) == 0
    return out


def distance(logits: np.ndarray, reference: np.ndarray) -> float:
    """Return the relative error of logits."""
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", MLX)
def test_mlx_lm_computes_with_the_decoded_values(model: Path, tmp_path: Path, preset: str) -> None:
    mx = pytest.importorskip("mlx.core")
    mlx_utils = pytest.importorskip("mlx_lm.utils")
    torch = pytest.importorskip("torch")
    from ingot.runtime.loading.transformers import load_model

    def decoded_logits(path: Path) -> np.ndarray:
        decoded = load_model(path, dtype="f32", keep_packed=False, cache=False, model_dir=model)
        with torch.inference_mode():
            return np.asarray(decoded(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0])

    out = quantized(model, tmp_path / "out", "mlx", preset)
    loaded, _ = mlx_utils.load_model(out)
    logits = np.array(loaded(mx.array([TOKENS]))[0].astype(mx.float32))
    reference = decoded_logits(out)
    assert distance(logits, reference) < 0.02
    assert distance(logits, decoded_logits(model)) > 2 * distance(logits, reference)


@pytest.mark.parametrize("preset", GGUF)
def test_gguf_decodes_the_same_values(model: Path, tmp_path: Path, preset: str) -> None:
    gguf = pytest.importorskip("gguf")
    out = quantized(model, tmp_path / "out.gguf", "llama.cpp", preset)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    assert GGUF[preset] in {tensor.tensor_type.name for tensor in tensors.values()}
    with ingot.open(out) as checkpoint:
        assert set(checkpoint) == set(tensors)
        for name, tensor in tensors.items():
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(values, checkpoint[name].numpy("f32")), name
