"""The perplexity of a text by llama.cpp as the package xllamacpp has it, through llama.cpp's C interface.

    python llama_perplexity.py MODEL.gguf TEXT LENGTH COUNT

prints JSON: ``perplexity`` of the first COUNT windows of LENGTH tokens, ``bos`` (null if llama.cpp adds none) and all
``tokens`` of these windows. As in ``llama-perplexity``, BOS takes the place of each window's first token. All tokens
but the first are scored; that program scores the second half of a window. llama.cpp aborts the process on some errors,
so this is a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

_POINTER, _I32 = ctypes.c_void_p, ctypes.c_int32


class Parameters(ctypes.Structure):
    """Parameters of a model or a context as llama.cpp makes them; longer than either, and never looked into."""

    _fields_ = [("data", ctypes.c_byte * 1024)]


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = [
        ("n_tokens", _I32), ("token", ctypes.POINTER(_I32)), ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(_I32)), ("n_seq_id", ctypes.POINTER(_I32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(_I32))), ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (Parameters, []),
    "llama_context_default_params": (Parameters, []),
    "llama_model_load_from_file": (_POINTER, [ctypes.c_char_p, Parameters]),
    "llama_init_from_model": (_POINTER, [_POINTER, Parameters]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (_I32, [_POINTER]),
    "llama_vocab_get_add_bos": (ctypes.c_bool, [_POINTER]),
    "llama_vocab_bos": (_I32, [_POINTER]),
    "llama_tokenize": (
        _I32, [_POINTER, ctypes.c_char_p, _I32, ctypes.POINTER(_I32), _I32, ctypes.c_bool, ctypes.c_bool],
    ),
    "llama_batch_init": (Batch, [_I32, _I32, _I32]),
    "llama_decode": (_I32, [_POINTER, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_POINTER, _I32]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, ctypes.c_bool]),
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_POINTER, _POINTER]),
}  # fmt: skip


def load_library() -> Any:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def tokenize(library: Any, vocab: int, text: bytes) -> list[int]:
    tokens = (_I32 * (len(text) + 8))()
    count = library.llama_tokenize(vocab, text, len(text), tokens, len(tokens), False, True)
    if count < 0:
        raise SystemExit(f"expected at most {len(tokens)} tokens, found {-count}")
    return list(tokens[:count])


def losses(library: Any, context: int, vocabulary: int, windows: list[list[int]]) -> Iterator[float]:
    """Yield the sum of the negative log-likelihoods of each window's tokens but the first."""
    batch = library.llama_batch_init(len(windows[0]), 0, 1)
    for window in windows:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        for index, token in enumerate(window):
            batch.token[index], batch.pos[index], batch.logits[index] = token, index, 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        batch.n_tokens = len(window)
        if library.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        loss = 0.0
        for index, token in enumerate(window[1:]):
            row = library.llama_get_logits_ith(context, index)
            logits = np.ctypeslib.as_array(row, (vocabulary,)).astype(np.float64)
            loss += float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])
        yield loss


def main() -> None:
    model_path, text, length, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    library = load_library()
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)(lambda *_: None)
    library.llama_log_set(ctypes.cast(silent, _POINTER), None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(model_path.encode(), library.llama_model_default_params())
    context = library.llama_init_from_model(model, library.llama_context_default_params()) if model else None
    if not context:
        raise SystemExit(f"llama.cpp does not load {model_path}")
    vocab = library.llama_model_get_vocab(model)
    tokens = tokenize(library, vocab, Path(text).read_bytes())[: length * count]
    bos = library.llama_vocab_bos(vocab) if library.llama_vocab_get_add_bos(vocab) else None
    windows = [tokens[first : first + length] for first in range(0, len(tokens), length)]
    if bos is not None:
        windows = [[bos, *window[1:]] for window in windows]
    total = sum(losses(library, context, library.llama_vocab_n_tokens(vocab), windows))
    scored = sum(len(window) - 1 for window in windows)
    print(json.dumps({"perplexity": float(np.exp(total / scored)), "bos": bos, "tokens": windows}))


if __name__ == "__main__":
    main()
