"""Models for tests of libraries: a small base, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ingot.artifacts.save import save

SHAPES = {"embed.weight": (64, 256), "layers.0.up.weight": (256, 128), "layers.0.norm.weight": (256,)}


def weights(seed: int = 0) -> dict[str, Any]:
    """Return the tensors of a model in bf16."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / 16).astype(np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in SHAPES.items()
    }


def moved(base: Mapping[str, Any], seed: int, share: float = 0.02) -> dict[str, Any]:
    """Change a share of each tensor's values."""
    rng = np.random.default_rng(seed)
    return {
        name: np.where(rng.random(values.shape) < share, values + values.dtype.type(0.01), values).astype(values.dtype)
        for name, values in base.items()
    }


def folder(path: Path, tensors: Mapping[str, Any]) -> Path:
    """Make a model's folder, with what lies beside the weights."""
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (path / "sub").mkdir()
    (path / "sub" / "notes.txt").write_text("x" * 3000 + path.name)
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Return all files in a folder, at any depth."""
    return {item.relative_to(path).as_posix(): item.read_bytes() for item in path.rglob("*") if item.is_file()}
