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
from llama_logits import POINTER, load_library, make_batch

_ERROR = 4
_messages: list[str] = []


def version() -> str:
    return f"xllamacpp {version_of('xllamacpp')}"


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)
def _store_error(level: int, text: bytes, _: Any) -> None:
    if level >= _ERROR:
        _messages.append(text.decode("utf-8", "replace"))


_LIBRARY = load_library()
_LIBRARY.llama_log_set(ctypes.cast(_store_error, POINTER), None)
_LIBRARY.llama_backend_init()


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
    batch = make_batch(_LIBRARY, tokens)
    for index in range(len(tokens)):
        batch.pos[index] = start + index
    if _LIBRARY.llama_decode(context, batch):
        raise ValueError("llama_decode failed")
    rows = (_LIBRARY.llama_get_logits_ith(context, index) for index in range(len(tokens)))
    return np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])
