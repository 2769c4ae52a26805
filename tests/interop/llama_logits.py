"""Logits of GGUF files by llama.cpp, as the package xllamacpp has it, through llama.cpp's C interface.

    python llama_logits.py JOBS.json

where JOBS.json is a list of objects with ``path`` (a GGUF file), ``out`` (the .npy file to write, f32
[tokens, values]), ``tokens`` and optionally ``decoder_tokens`` (for models with an encoder) or ``embeddings`` (true for
models without a head). The program prints one line of JSON per job: ``{"path": ..., "error": ""}``. llama.cpp aborts
the process on some errors, so a caller runs this program again for the jobs after the last printed line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

POINTER, I32 = ctypes.c_void_p, ctypes.c_int32
_MESSAGES: list[str] = []


class Parameters(ctypes.Structure):
    """Parameters of a model or a context as llama.cpp makes them; the structure is larger than either of the two."""

    _fields_ = [("data", ctypes.c_byte * 1024)]


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = [
        ("n_tokens", I32), ("token", ctypes.POINTER(I32)), ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(I32)), ("n_seq_id", ctypes.POINTER(I32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(I32))), ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (Parameters, []),
    "llama_context_default_params": (Parameters, []),
    "llama_model_load_from_file": (POINTER, [ctypes.c_char_p, Parameters]),
    "llama_model_free": (None, [POINTER]),
    "llama_model_n_embd": (I32, [POINTER]),
    "llama_init_from_model": (POINTER, [POINTER, Parameters]),
    "llama_free": (None, [POINTER]),
    "llama_set_n_threads": (None, [POINTER, I32, I32]),
    "llama_set_embeddings": (None, [POINTER, ctypes.c_bool]),
    "llama_model_get_vocab": (POINTER, [POINTER]),
    "llama_vocab_n_tokens": (I32, [POINTER]),
    "llama_batch_init": (Batch, [I32, I32, I32]),
    "llama_encode": (I32, [POINTER, Batch]),
    "llama_decode": (I32, [POINTER, Batch]),
    "llama_get_memory": (POINTER, [POINTER]),
    "llama_memory_clear": (None, [POINTER, ctypes.c_bool]),
    "llama_vocab_get_add_bos": (ctypes.c_bool, [POINTER]),
    "llama_vocab_bos": (I32, [POINTER]),
    "llama_tokenize": (
        I32, [POINTER, ctypes.c_char_p, I32, ctypes.POINTER(I32), I32, ctypes.c_bool, ctypes.c_bool],
    ),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [POINTER, I32]),
    "llama_get_embeddings_ith": (ctypes.POINTER(ctypes.c_float), [POINTER, I32]),
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [POINTER, POINTER]),
}  # fmt: skip


def load_library() -> Any:
    """Return the shared library of the package xllamacpp with the signatures of ``_FUNCTIONS``."""
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def make_batch(library: Any, tokens: list[int]) -> Batch:
    """Return a batch of one sequence that requests an output for each token."""
    batch: Batch = library.llama_batch_init(len(tokens), 0, 1)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index], batch.logits[index] = token, index, 1
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
    batch.n_tokens = len(tokens)
    return batch


def compute(library: Any, context: int, job: dict[str, Any], width: int) -> Any:
    """Return the logits or embeddings of each token, f32 [tokens, width]."""
    library.llama_set_n_threads(context, 1, 1)
    embeds = bool(job.get("embeddings"))
    library.llama_set_embeddings(context, embeds)
    tokens = job["tokens"]
    if "decoder_tokens" in job:
        if library.llama_encode(context, make_batch(library, tokens)):
            raise ValueError("llama_encode failed")
        tokens = job["decoder_tokens"]
    if library.llama_decode(context, make_batch(library, tokens)):
        raise ValueError("llama_decode failed")
    read = library.llama_get_embeddings_ith if embeds else library.llama_get_logits_ith
    rows = [read(context, index) for index in range(len(tokens))]
    if not all(rows):
        raise ValueError("llama.cpp returned no output")
    return np.stack([np.ctypeslib.as_array(row, (width,)).copy() for row in rows])


def run(library: Any, job: dict[str, Any]) -> str:
    """Write the output of one job; return an error message, empty on success."""
    _MESSAGES.clear()
    model = library.llama_model_load_from_file(job["path"].encode(), library.llama_model_default_params())
    if not model:
        return "not loaded: " + "; ".join(_MESSAGES[-3:])
    context = library.llama_init_from_model(model, library.llama_context_default_params())
    if not context:
        return "no context: " + "; ".join(_MESSAGES[-3:])
    vocab = library.llama_model_get_vocab(model)
    embeds = job.get("embeddings")
    width = library.llama_model_n_embd(model) if embeds else library.llama_vocab_n_tokens(vocab)
    try:
        np.save(job["out"], compute(library, context, job, width))
    except ValueError as error:
        return str(error)
    finally:
        library.llama_free(context)
        library.llama_model_free(model)
    return ""


def main() -> None:
    """Run the jobs of the file that the command line names."""
    library = load_library()

    def log(level: int, text: bytes, _: Any) -> None:
        if level >= 3:
            _MESSAGES.append(text.decode("utf-8", "replace").strip())

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)(log)
    library.llama_log_set(ctypes.cast(callback, POINTER), None)
    library.llama_backend_init()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps({"path": job["path"], "error": run(library, job)}), flush=True)


if __name__ == "__main__":
    main()
