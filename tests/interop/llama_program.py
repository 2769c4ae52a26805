"""What llama.cpp makes of files, asked through llama-cpp-python: run by the Python that has it, not by ours.

    python llama_program.py JOBS.json

The file holds a list of jobs, each a list of a function's name below and its arguments; answers are printed as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

F32 = 0  # ggml's number of the type: keys and values of attention are kept as they are, not in f16


def plainly() -> None:
    """Have weights computed with as they lie in the file: tiles of AMX end the process on some virtual machines."""
    defaults = llama_cpp.llama_model_default_params()
    defaults.use_extra_bufts = False
    llama_cpp.llama_cpp.llama_model_default_params = lambda: defaults


def opened(path: str, window: int) -> Any:
    return llama_cpp.Llama(
        path, n_ctx=window, n_batch=window, n_threads=2, logits_all=True, type_k=F32, type_v=F32, verbose=False
    )


def logits(path: str, windows: list[list[int]], out: str) -> list[int]:
    """Save the logits of every position of windows of one length, f32 [windows, positions, vocabulary]."""
    model = opened(path, len(windows[0]))
    found = []
    for tokens in windows:
        model.reset()
        model.eval(tokens)
        found.append(np.array(model.scores[: len(tokens)], np.float32))
    np.save(out, np.stack(found))
    return [len(windows), *found[0].shape]


def hidden(path: str, text: str, out: str) -> list[int]:
    """Save what an encoder makes of a text's tokens, f32 [tokens, size], its own tokens around it."""
    model = llama_cpp.Llama(
        path, embedding=True, n_ctx=256, n_batch=256, n_threads=2, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE,
        type_k=F32, type_v=F32, verbose=False,
    )  # fmt: skip
    found = np.array(model.embed(Path(text).read_text(), normalize=False), np.float32)
    np.save(out, found)
    return list(found.shape)


def loss(path: str, windows: list[list[int]]) -> float:
    """Return the mean negative log probability of each token but the first of windows of one length."""
    model, found = opened(path, len(windows[0])), []
    for tokens in windows:
        model.reset()
        model.eval(tokens)
        scores = np.array(model.scores[: len(tokens) - 1], np.float64)
        most = scores.max(-1)
        total = most + np.log(np.exp(scores - most[:, None]).sum(-1))
        found.append((total - scores[np.arange(len(scores)), tokens[1:]]).mean())
    return float(np.mean(found))


def tokens(path: str, text: str) -> list[int]:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    return list(model.tokenize(Path(text).read_bytes(), add_bos=False, special=False))


def generate(path: str, prompt: str, count: int) -> str:
    model = llama_cpp.Llama(path, n_ctx=256, n_threads=2, verbose=False)
    return str(model(prompt, max_tokens=count, temperature=0.0)["choices"][0]["text"])


def quantize(source: str, target: str, kind: int) -> int:
    """Quantize every matrix of a file by llama.cpp's own quantizer; ``kind`` is one of its file types."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.pure, settings.nthread = kind, True, 2
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(settings)))


def main() -> None:
    plainly()
    made = {function.__name__: function for function in (logits, hidden, loss, tokens, generate, quantize)}
    print(json.dumps([made[name](*arguments) for name, *arguments in json.loads(Path(sys.argv[1]).read_text())]))


if __name__ == "__main__":
    main()
