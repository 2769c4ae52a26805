"""Builders of small bases and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import ingot

Array = np.ndarray[Any, np.dtype[Any]]
RNG_SEED = 7
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"
EMBED = "model.embed_tokens"
SHAPES = {f"{EMBED}.weight": (24, 16), f"{Q}.weight": (16, 16), f"{DOWN}.weight": (16, 40), f"{Q}.bias": (16,)}


def values(*shape: int, seed: int = RNG_SEED) -> Array:
    """Return reproducible f32 values."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def base_folder(path: Path, dtype: str = "f32", config: dict[str, Any] | None = None) -> Path:
    """Write a small base in an element type and return its folder."""
    from ingot.core.numeric.dtypes import cast

    path.mkdir()
    tensors = {name: cast(values(*shape), dtype) for name, shape in SHAPES.items()}
    ingot.save(path / "model.safetensors", tensors)
    (path / "config.json").write_text(
        json.dumps(config or {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return path


def peft_folder(path: Path, tensors: dict[str, Array], **config: Any) -> Path:
    """Write a PEFT folder; names lack PEFT's prefix. Rank 4 and alpha 8 unless the config says otherwise."""
    path.mkdir()
    ingot.save(path / "adapter_model.safetensors", {f"base_model.model.{name}": item for name, item in tensors.items()})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def lora(module: str = Q, rows: int = 16, cols: int = 16, rank: int = 4, seed: int = 1) -> dict[str, Array]:
    """Return the factors of a linear layer by PEFT's names."""
    return {
        f"{module}.lora_A.weight": values(rank, cols, seed=seed),
        f"{module}.lora_B.weight": values(rows, rank, seed=seed),
    }
