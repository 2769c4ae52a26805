"""A small Llama, a draft head for it and a Core ML package."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot

LAYERS, HIDDEN, INNER, VOCAB, DRAFT = 2, 64, 160, 48, 16


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)

    made = {"lm_head.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": matrix(HIDDEN)}
    for layer in reversed(range(LAYERS)):
        prefix = f"model.layers.{layer}."
        made |= {f"{prefix}self_attn.{one}_proj.weight": matrix(HIDDEN, HIDDEN) for one in "qkvo"}
        made |= {f"{prefix}mlp.{one}_proj.weight": matrix(INNER, HIDDEN) for one in ("gate", "up")}
        made[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        made[prefix + "input_layernorm.weight"] = matrix(HIDDEN)
    return made | {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}


def head() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT, HIDDEN)}
    shapes |= {f"midlayer.self_attn.{one}_proj.weight": (HIDDEN, 2 * HIDDEN) for one in "qkv"}
    shapes |= {"midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN), "midlayer.mlp.down_proj.weight": (HIDDEN, INNER)}
    shapes |= {f"midlayer.mlp.{one}_proj.weight": (INNER, HIDDEN) for one in ("gate", "up")}
    made = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    tokens = np.arange(DRAFT) * 3
    mask = np.zeros(VOCAB, np.bool_)
    mask[tokens] = True
    return made | {"d2t": tokens - np.arange(DRAFT), "t2d": mask}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "model.safetensors", weights(), {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "draft.safetensors", head())
    return tmp_path / "draft.safetensors"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "model.mlpackage"
    (folder / "Data" / "com.apple.CoreML").mkdir(parents=True)
    (folder / "Data" / "com.apple.CoreML" / "model.mlmodel").write_bytes(bytes(range(200)))
    items = {"1": {"path": "com.apple.CoreML/model.mlmodel", "author": "a", "name": "model.mlmodel"}}
    about = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": "1"}
    (folder / "Manifest.json").write_text(json.dumps(about))
    return folder
