"""A model of one layer whose matrices every preset for a runtime can quantize, and its statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ingot.model.statistics import Statistics
from ingot.model.tensor import Array
from tests.support import model_folder

HIDDEN, INNER, KV = 128, 256, 64
CONFIG = {
    **model_folder.CONFIG,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def written(path: Path, dtype: Any) -> Path:
    """Write a model folder with weights of this type, and return it."""
    rng = np.random.default_rng(5)
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (model_folder.ROWS, HIDDEN), "lm_head.weight": (model_folder.ROWS, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    weights = {name: (0.05 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
    return model_folder.write(path, CONFIG, weights)


def statistics() -> Statistics:
    """Return statistics of the inputs of all matrices in the layer and of the head."""
    return Statistics.in_memory(arrays())


def arrays() -> dict[str, Array]:
    """Return the arrays of ``statistics``."""
    rng = np.random.default_rng(6)
    result: dict[str, Array] = {}
    columns = {f"model.layers.0.{name}.weight": shape[1] for name, shape in SHAPES.items() if len(shape) == 2}
    for name, cols in {**columns, "lm_head.weight": HIDDEN}.items():
        inputs = rng.standard_normal((cols, 300)) * rng.uniform(0.1, 2, (cols, 1))
        result[f"{name}:inputs"] = (inputs @ inputs.T / 300).astype(np.float32)
        result[f"{name}:in_sum2"] = np.square(inputs).mean(1).astype(np.float32)
        result[f"{name}:absmax"] = np.abs(inputs).max(1).astype(np.float32)
        result[f"{name}:count"] = np.array([300])
    return result
