"""vLLM on the CPU, in this process, in float16 or, for int8, bfloat16.

``prompt_logprobs=-1`` returns the whole vocabulary.
"""

from __future__ import annotations

import gc
import os
import re
from itertools import pairwise
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import numpy as np
import torch
import vllm
from worker import NotRunError, Output, one_line

_NO_KERNEL = re.compile(
    r"failed to find a kernel|no (?:\w+ )*kernel|not supported (?:on|for) (?:the )?cpu|"
    r"only (?:be )?supported (?:on|for) (?:cuda|gpu)|"
    r"marlin (?:fp4 )?(?:not available|does not support)|"
    r"no attribute '\w+' .*_C|_OpNamespace|requires? (?:cuda|a gpu)|not compiled|get_device_capability",
    re.IGNORECASE,
)
"""Messages with which vLLM says, after its parser accepted a configuration, that this machine has no kernel for it."""

_BFLOAT16 = ("w8a8",)
"""Presets that run in bfloat16: in float16 vLLM's int8 kernel throws "scale_C: scalar path not implemented!"
(``gemm_int8.cpp``) in a thread, which ends the process."""


def version() -> str:
    return f"vllm {vllm.__version__.partition('+')[0]}, torch {torch.__version__.partition('+')[0]}"


def compute(job: dict[str, Any]) -> Output:
    dtype = "bfloat16" if job["preset"] in _BFLOAT16 else "float16"
    try:
        engine = vllm.LLM(
            job["path"], dtype=dtype, enforce_eager=True, max_model_len=384, max_num_seqs=2, max_logprobs=-1,
            max_num_batched_tokens=384, enable_prefix_caching=False, disable_log_stats=True, seed=0,
        )  # fmt: skip
    except Exception as error:
        text = one_line(" <- ".join(_messages(error)))
        if _NO_KERNEL.search(text):
            raise NotRunError(f"configuration accepted; {text}") from error
        raise ValueError(text) from error
    try:
        read = vllm.SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
        )
        (answer,) = engine.generate([{"prompt_token_ids": job["tokens"]}], read, use_tqdm=False)
        logits = _rows(answer.prompt_logprobs)
        write = vllm.SamplingParams(temperature=0, max_tokens=job["count"], ignore_eos=True, detokenize=False)
        (text,) = engine.generate([{"prompt_token_ids": job["prompt"]}], write, use_tqdm=False)
        return Output(logits, list(text.outputs[0].token_ids), list(range(len(logits))), f"{_kernels(engine)}, {dtype}")
    finally:
        del engine
        gc.collect()


def _rows(flat: Any) -> np.ndarray:
    """Return log-probabilities [positions, vocabulary] of flat lists; the first token of a prompt has none."""
    starts = [start for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if end > start]
    ids = np.array(flat.token_ids)
    values = np.array(flat.logprobs, np.float32)
    bounds = [*starts, len(ids)]
    rows = np.full((len(starts), int(ids.max()) + 1), -np.inf, np.float32)
    for index, (start, end) in enumerate(pairwise(bounds)):
        rows[index, ids[start:end]] = values[start:end]
    if not np.isfinite(rows).all():
        raise ValueError("some log-probabilities are missing or no number")
    return rows


def _messages(error: BaseException) -> list[str]:
    """Return the messages of an error and of its causes."""
    texts = [f"{type(error).__name__}: {error}"]
    cause = error.__cause__ or error.__context__
    return texts + (_messages(cause) if cause is not None else [])


def _kernels(engine: Any) -> str:
    """Return the classes that multiply by packed weights."""
    names = set()
    for method in _methods(engine):
        scheme = getattr(method, "scheme", None) or getattr(method, "kernel", None) or method
        kernel = getattr(scheme, "kernel", None) or scheme
        names.add(type(kernel).__name__)
    return ", ".join(sorted(names))


def _methods(engine: Any) -> list[Any]:
    try:
        model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    except AttributeError:
        return []
    methods = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and "Embedding" not in type(method).__name__:
            methods.append(getattr(module, "scheme", None) or method)
    return methods
