"""Tokens of texts by llama.cpp, as the package xllamacpp has it, through llama.cpp's C interface.

    python llama_tokens.py JOBS.json

where JOBS.json is a list of objects with ``path`` (a GGUF file, of which only the vocabulary is read), ``texts``, and
optionally ``special`` (true to add the tokens around a text) and ``parse`` (true to find special tokens in a text). The
program prints one line of JSON per job: ``{"path": ..., "error": "", "ids": [[...], ...]}``. llama.cpp aborts the
process on some errors, so a caller runs this program again for the jobs after the last printed line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from llama_logits import I32, POINTER, load_library

_MESSAGES: list[str] = []
VOCAB_ONLY = 72
"""Offset of the member in ``llama_model_params``; the structure's first two true booleans follow it."""


def vocabulary_parameters(library: Any) -> Any:
    """Return parameters that read the vocabulary of a file and no tensors."""
    parameters = library.llama_model_default_params()
    defaults = bytes(parameters.data[VOCAB_ONLY : VOCAB_ONLY + 3])
    if defaults != bytes([0, 0, 1]):  # vocab_only, check_tensors, use_extra_bufts
        raise SystemExit(f"this llama.cpp has another llama_model_params: {defaults!r} at {VOCAB_ONLY}")
    parameters.data[VOCAB_ONLY] = 1
    return parameters


def run(library: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of a job's texts, or an error message."""
    _MESSAGES.clear()
    model = library.llama_model_load_from_file(job["path"].encode(), vocabulary_parameters(library))
    if not model:
        return {"error": "not loaded: " + "; ".join(_MESSAGES[-3:]), "ids": []}
    vocab = library.llama_model_get_vocab(model)
    rows = []
    for text in job["texts"]:
        data = text.encode()
        ids = (I32 * (len(data) + 16))()
        special, parse = bool(job.get("special")), bool(job.get("parse"))
        count = library.llama_tokenize(vocab, data, len(data), ids, len(ids), special, parse)
        rows.append(list(ids[:count]))
    library.llama_model_free(model)
    return {"error": "", "ids": rows}


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
        print(json.dumps({"path": job["path"], **run(library, job)}), flush=True)


if __name__ == "__main__":
    main()
