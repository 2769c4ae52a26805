"""Ask a real llama.cpp (the package xllamacpp) about a GGUF file: ``python xllamacpp_program.py JOB``, JSON to JSON.

A process of its own for each job: llama.cpp ends a process on what it takes for a defect of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import xllamacpp


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answer(job: dict[str, Any]) -> Any:
    """Return what the server answers to one request, or why it does not open the file."""
    params = xllamacpp.CommonParams()
    params.model.path = job["path"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 128, 1, 0
    params.cpuparams.n_threads = 2
    params.warmup = params.fit_params = False
    params.embedding = job["kind"] in ("embeddings", "rerank")
    if job["kind"] == "rerank":  # what --reranking does
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    if job.get("exact"):
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(item, 1.0) for item in job.get("adapters", [])]
    params.port = free_port()
    try:
        server = xllamacpp.Server(params)
    except Exception as error:
        return {"refused": str(error)}
    if job["kind"] == "load":
        return {"loaded": True}
    if job["kind"] == "embeddings":
        return server.handle_embeddings({"input": job["texts"]})
    if job["kind"] == "rerank":
        return server.handle_rerank({"query": job["query"], "documents": job["texts"]})
    request = {
        "prompt": job["prompt"],
        "temperature": 0.0,
        "max_tokens": job.get("count", 1),
        "logprobs": job.get("tokens"),
        # the first token is an ASCII character: there are no probabilities beside an incomplete one or the end
        "logit_bias": [[5, 1000.0]] if "tokens" in job else [],
    }
    return server.handle_completions(request)


print("ANSWER", json.dumps(answer(json.loads(sys.argv[1]))), flush=True)
os._exit(0)
