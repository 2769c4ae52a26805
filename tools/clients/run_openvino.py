"""OpenVINO GenAI on the CPU with ``EXECUTION_MODE_HINT`` ``ACCURACY``: f32 products, no quantized inputs or cache.

The pipeline reads the GGUF file, generates the text, and saves the model that it built; OpenVINO computes logits of
this model. ``PERFORMANCE``, the default, rounds to bf16 on processors that multiply it; its KL is in the note.
"""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import Output

_ACCURATE = {"EXECUTION_MODE_HINT": "ACCURACY", "KV_CACHE_PRECISION": "f32"}


def version() -> str:
    return f"openvino-genai {version_of('openvino-genai')}"


def compute(job: dict[str, Any]) -> Output:
    pipeline = openvino_genai.LLMPipeline(job["path"], "CPU", enable_save_ov_model=True, **_ACCURATE)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = job["count"], False, True
    prompt = openvino.Tensor(np.array([job["prompt"]], np.int64))
    text = pipeline.generate(prompt, config).tokens[0]
    path = Path(job["path"]).with_name("openvino_model.xml")
    logits = _logits(path, job["tokens"], _ACCURATE)
    default = divergence(logits, _logits(path, job["tokens"], {}))
    return Output(logits, list(text), note=f"with its default settings, KL to these logits {default:.1e}")


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    first, second = (row - np.logaddexp.reduce(row, -1, keepdims=True) for row in (reference, logits))
    return float((np.exp(first) * (first - second)).sum(-1).mean())


def _logits(path: Path, tokens: list[int], settings: dict[str, str]) -> np.ndarray:
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    ids = np.array([tokens], np.int64)
    result = request.infer(
        {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    return np.array(next(iter(result.values()))[0])
