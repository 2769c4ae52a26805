"""mlx_lm on the CPU: loads a folder as ``mlx_lm.generate`` does."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step
from worker import Output


def version() -> str:
    return f"mlx-lm {version_of('mlx-lm')}, mlx {version_of('mlx')}"


def compute(job: dict[str, Any]) -> Output:
    mx.set_default_device(mx.cpu)
    model, _ = mlx_lm.load(job["path"])
    logits = np.array(model(mx.array([job["tokens"]]))[0].astype(mx.float32))
    steps = generate_step(mx.array(job["prompt"]), model, max_tokens=job["count"])
    return Output(logits, [int(token) for token, _ in steps])
