"""ONNX Runtime on the CPU; text is generated without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from worker import Output


def version() -> str:
    return f"onnxruntime {onnxruntime.__version__}"


def compute(job: dict[str, Any]) -> Output:
    session = onnxruntime.InferenceSession(job["path"], providers=["CPUExecutionProvider"])

    def logits(tokens: list[int]) -> np.ndarray:
        return session.run(["logits"], {"input_ids": np.array([tokens], np.int64)})[0][0]

    text = list(job["prompt"])
    for _ in range(job["count"]):
        text.append(int(logits(text)[-1].argmax()))
    return Output(logits(job["tokens"]), text[len(job["prompt"]) :])
