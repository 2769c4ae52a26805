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
from llama_logits import I32, POINTER, load_library, make_batch


def tokenize(library: Any, vocab: int, text: bytes) -> list[int]:
    tokens = (I32 * (len(text) + 8))()
    count = library.llama_tokenize(vocab, text, len(text), tokens, len(tokens), False, True)
    if count < 0:
        raise SystemExit(f"expected at most {len(tokens)} tokens, found {-count}")
    return list(tokens[:count])


def losses(library: Any, context: int, vocabulary: int, windows: list[list[int]]) -> Iterator[float]:
    """Yield the sum of the negative log-likelihoods of each window's tokens but the first."""
    for window in windows:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        if library.llama_decode(context, make_batch(library, window)):
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
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)(lambda *_: None)
    library.llama_log_set(ctypes.cast(silent, POINTER), None)
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
