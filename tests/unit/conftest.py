"""A small checkpoint with the names of a Llama, as a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cluster import pool

LAYERS, HIDDEN, INNER, VOCAB = 3, 96, 160, 64


def llama_weights(seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * 0.05).astype(dtype)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = np.ones(HIDDEN, dtype)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[prefix + "mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        weights[prefix + "post_attention_layernorm.weight"] = np.ones(HIDDEN, dtype)
    weights["model.norm.weight"] = np.ones(HIDDEN, dtype)
    weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return weights


@pytest.fixture(scope="session")
def weights() -> dict[str, np.ndarray]:
    return llama_weights()


@pytest.fixture
def model(tmp_path: Path, weights: dict[str, np.ndarray]) -> Path:
    """A model folder: model.safetensors with metadata, config.json and a tokenizer."""
    folder = tmp_path / "llama"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", weights, {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama", "model_file": "llama.py"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def strays(tmp_path: Path) -> Callable[[], list[str]]:
    """Return what lies in the test's folder that a user did not ask for."""
    return lambda: sorted(path.name for path in tmp_path.rglob("*") if "ingot-partial" in path.name)


@pytest.fixture
def hire(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have what the engine ``processes`` does next be done by these pools."""
    return lambda *pools: monkeypatch.setattr(pool, "Processes", iter(pools).__next__)
