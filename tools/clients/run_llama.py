"""llama.cpp as the package xllamacpp has it, through its C interface, with the default settings of a context."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
from worker import Output

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "interop"))
from llama_perplexity import load_library

_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_messages: list[str] = []


def version() -> str:
    return f"xllamacpp {version_of('xllamacpp')}"


@_SILENT
def _keep_error(level: int, text: bytes, _: Any) -> None:
    if level >= 4:
        _messages.append(text.decode("utf-8", "replace"))


def _library() -> Any:
    library = load_library()
    for name in ("llama_free", "llama_model_free"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    library.llama_set_n_threads.restype = None
    library.llama_log_set(ctypes.cast(_keep_error, ctypes.c_void_p), None)
    library.llama_backend_init()
    return library


_LIBRARY = _library()


def compute(job: dict[str, Any]) -> Output:
    _messages.clear()
    model = _LIBRARY.llama_model_load_from_file(job["path"].encode(), _LIBRARY.llama_model_default_params())
    if not model:
        raise ValueError("".join(_messages))
    context = _LIBRARY.llama_init_from_model(model, _LIBRARY.llama_context_default_params())
    if not context:
        raise ValueError("".join(_messages))
    try:
        _LIBRARY.llama_set_n_threads(context, 2, 2)
        size = _LIBRARY.llama_vocab_n_tokens(_LIBRARY.llama_model_get_vocab(model))
        logits = _logits(context, job["tokens"], 0, size)
        _LIBRARY.llama_memory_clear(_LIBRARY.llama_get_memory(context), True)
        return Output(logits, _generate(context, job["prompt"], job["count"], size))
    finally:
        _LIBRARY.llama_free(context)
        _LIBRARY.llama_model_free(model)


def _generate(context: int, prompt: list[int], count: int, size: int) -> list[int]:
    tokens = [int(_logits(context, prompt, 0, size)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(_logits(context, tokens[-1:], len(prompt) + len(tokens) - 1, size)[-1].argmax()))
    return tokens


def _logits(context: int, tokens: list[int], start: int, size: int) -> np.ndarray:
    """Return the logits of tokens after the ``start`` tokens that the context has seen."""
    batch = _LIBRARY.llama_batch_init(len(tokens), 0, 1)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = start + index
        batch.logits[index] = 1
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
    batch.n_tokens = len(tokens)
    if _LIBRARY.llama_decode(context, batch):
        raise ValueError("llama_decode failed")
    rows = (_LIBRARY.llama_get_logits_ith(context, index) for index in range(len(tokens)))
    return np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])
