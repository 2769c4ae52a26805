"""Presets for MLX: mlx_lm loads the folder and has Ingot's values, experts included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.model.tensor import Array
from tests.support.preset_model import statistics, written

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

PRESETS = ("mlx-8bit", "mlx-6bit", "mlx-4bit", "mlx-3bit", "mlx-mixed-4-6", "mlx-mxfp4", "mlx-nvfp4")
CALIBRATED = ("mlx-8bit", "mlx-6bit", "mlx-4bit", "mlx-3bit", "mlx-mixed-4-6", "mlx-mxfp4")


def dequantized(arrays: dict[str, Any], stem: str, grid: dict[str, Any]) -> Array:
    """Return MLX's values of a layer, which it computes in f32 if scales and offsets are."""
    scales, biases = arrays[f"{stem}.scales"], arrays.get(f"{stem}.biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return np.array(mx.dequantize(arrays[f"{stem}.weight"], scales, biases, **grid).astype(mx.float32))


def check(folder: Path) -> set[tuple[int, int]]:
    """Compare all packed layers, let the model compute, and return bits and groups."""
    config = json.loads((folder / "config.json").read_text())["quantization"]
    usual = {key: value for key, value in config.items() if not isinstance(value, dict)}
    arrays = mx.load(str(folder / "model.safetensors"))
    grids = set()
    with ingot.open(folder) as checkpoint:
        for name in checkpoint:
            if checkpoint[name].codec == "dense":
                assert checkpoint[name].dtype != "bf16" or usual["mode"] != "affine"
                continue
            stem = name.removesuffix(".weight")
            grid = {**usual, **config.get(stem, {})}
            expected = checkpoint[name].numpy("f32")
            assert np.array_equal(dequantized(arrays, stem, grid), expected), name
            grids.add((grid["bits"], grid["group_size"]))
    model, _ = mlx_lm.utils.load_model(folder)
    logits = model(mx.array([[1, 2, 3, 4]]))
    assert bool(mx.isfinite(logits).all())
    if usual["mode"] == "affine":
        assert logits.dtype == mx.float16  # all weights are, so that nothing is computed in f32
    return grids


@pytest.mark.parametrize("preset", PRESETS)
def test_mlx_lm_has_the_values(tmp_path: Path, preset: str) -> None:
    ingot.convert(written(tmp_path / "in", ml_dtypes.bfloat16), tmp_path / "out", preset, format="mlx")
    bits = {"mlx-mixed-4-6": {4, 6}, "mlx-mxfp4": {4}, "mlx-nvfp4": {4}}.get(preset) or {int(preset[4])}
    assert {bit for bit, _ in check(tmp_path / "out")} == bits


@pytest.mark.parametrize("preset", CALIBRATED)
def test_calibrated_presets(tmp_path: Path, preset: str) -> None:
    source = written(tmp_path / "in", ml_dtypes.bfloat16)
    report = ingot.convert(source, tmp_path / "out", f"{preset}-calibrated", format="mlx", calibration=statistics())
    rounded = {outcome.matrix for outcome in report.rounded}
    assert len(rounded) == (7 if preset == "mlx-mxfp4" else 8)
    grids = check(tmp_path / "out")
    ingot.convert(source, tmp_path / "plain", preset, format="mlx")
    assert grids <= check(tmp_path / "plain") | {(3, 64)}


@pytest.mark.parametrize("small_or_large", [1e-9, 1e6])
def test_values_that_f16_cannot_hold_keep_bf16(tmp_path: Path, small_or_large: float) -> None:
    """A group whose scale f16 cannot hold, and a norm whose weights would become zero or infinity."""
    source = written(tmp_path / "in", ml_dtypes.bfloat16)
    with ingot.open(source) as checkpoint:
        weights = {name: checkpoint[name].numpy() for name in checkpoint}
    name, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    weights[name] = (weights[name].astype(np.float32) * 1e-9).astype(ml_dtypes.bfloat16)
    weights[norm] = np.full(weights[norm].shape, small_or_large, ml_dtypes.bfloat16)
    ingot.save(source / "model.safetensors", weights, overwrite=True)
    ingot.convert(source, tmp_path / "out", "mlx-4bit", format="mlx")
    with ingot.open(tmp_path / "out") as checkpoint:
        assert checkpoint[name].parts["scales"].dtype == "bf16"
        assert checkpoint[norm].dtype == "bf16"
        assert checkpoint["model.layers.0.mlp.down_proj.weight"].parts["scales"].dtype == "f16"
        error = checkpoint[name].numpy("f32") - weights[name].astype(np.float32)
        assert np.abs(error).max() < 0.2 * np.abs(weights[name].astype(np.float32)).max()


@pytest.mark.parametrize("preset", ["mlx-4bit", "mlx-4bit-calibrated", "mlx-mxfp4"])
def test_stacks_of_experts_are_packed(tmp_path: Path, preset: str) -> None:
    """gpt-oss has ``experts.down_proj`` without ``.weight``; the view for MLX renames it."""
    rng = np.random.default_rng(8)
    stem = "model.layers.0.mlp.experts."
    shapes = {f"{stem}gate_up_proj": (2, 64, 128), f"{stem}down_proj": (2, 64, 64)}
    weights = {
        name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    weights |= {f"{name}_bias": np.zeros((2, shape[2]), ml_dtypes.bfloat16) for name, shape in shapes.items()}
    (tmp_path / "in").mkdir()
    ingot.save(tmp_path / "in" / "model.safetensors", weights)
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 2}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    ingot.convert(tmp_path / "in", tmp_path / "out", preset, format="mlx")
    with ingot.open(tmp_path / "out") as checkpoint:
        dense = [name for name in checkpoint if name.endswith(".weight") and checkpoint[name].codec == "dense"]
        assert not dense
        assert sorted(checkpoint)[:2] == [f"{stem}down_proj.bias", f"{stem}down_proj.weight"]
