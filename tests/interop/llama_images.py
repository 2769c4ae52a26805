"""Embeddings of images by llama.cpp, as the package xllamacpp has it, through the C interface of its library mtmd.

    python llama_images.py JOBS.json

where JOBS.json is a list of objects with ``path`` (the GGUF file of the text model), ``mmproj`` (that of the vision
model), ``image`` (a .npy file, u8 [height, width, 3]) and ``out`` (the .npy file to write, f32 [tokens, values]). The
program prints one line of JSON per job: ``{"path": ..., "error": ""}``; ``path`` is that of ``mmproj``. llama.cpp
aborts the process on some errors, so a caller runs this program again for the jobs after the last printed line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama_logits import I32, POINTER, Parameters, load_library

_MESSAGES: list[str] = []
_SIZE = ctypes.c_size_t
_USE_GPU, _FLASH_ATTENTION, _WARMUP = 0, 40, 44
"""Offsets of members of ``mtmd_context_params``."""


class Text(ctypes.Structure):
    """``mtmd_input_text``."""

    _fields_ = [
        ("text", ctypes.c_char_p), ("text_len", _SIZE), ("add_special", ctypes.c_bool), ("parse_special", ctypes.c_bool)
    ]  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_n_embd_inp": (I32, [POINTER]),
    "mtmd_context_params_default": (Parameters, []),
    "mtmd_default_marker": (ctypes.c_char_p, []),
    "mtmd_init_from_file": (POINTER, [ctypes.c_char_p, POINTER, Parameters]),
    "mtmd_free": (None, [POINTER]),
    "mtmd_bitmap_init": (POINTER, [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p]),
    "mtmd_input_chunks_init": (POINTER, []),
    "mtmd_input_chunks_size": (_SIZE, [POINTER]),
    "mtmd_input_chunks_get": (POINTER, [POINTER, _SIZE]),
    "mtmd_input_chunk_get_type": (ctypes.c_int, [POINTER]),
    "mtmd_input_chunk_get_n_tokens": (_SIZE, [POINTER]),
    "mtmd_tokenize": (I32, [POINTER, POINTER, ctypes.POINTER(Text), ctypes.POINTER(POINTER), _SIZE]),
    "mtmd_encode_chunk": (I32, [POINTER, POINTER]),
    "mtmd_get_output_embd": (ctypes.POINTER(ctypes.c_float), [POINTER]),
    "mtmd_log_set": (None, [POINTER, POINTER]),
    "mtmd_helper_log_set": (None, [POINTER, POINTER]),
}


def parameters(library: Any) -> Any:
    """Return parameters for exact results on the CPU, without a first image for practice."""
    values = library.mtmd_context_params_default()
    if values.data[_USE_GPU] != 1 or values.data[_WARMUP] != 1:
        raise SystemExit("this llama.cpp has another mtmd_context_params")
    values.data[_USE_GPU] = values.data[_WARMUP] = 0
    for offset in range(4):
        values.data[_FLASH_ATTENTION + offset] = 0
    return values


def embeddings(library: Any, context: int, image: Any, width: int) -> Any:
    """Return the embeddings of the first picture that llama.cpp makes of an image, f32 [tokens, width]."""
    height, columns, _ = image.shape
    bitmap = library.mtmd_bitmap_init(columns, height, np.ascontiguousarray(image).tobytes())
    chunks = library.mtmd_input_chunks_init()
    marker = library.mtmd_default_marker()
    bitmaps = (POINTER * 1)(bitmap)
    if library.mtmd_tokenize(context, chunks, ctypes.byref(Text(marker, len(marker), False, True)), bitmaps, 1):
        raise ValueError("mtmd_tokenize failed")
    for index in range(library.mtmd_input_chunks_size(chunks)):
        chunk = library.mtmd_input_chunks_get(chunks, index)
        if library.mtmd_input_chunk_get_type(chunk) == 1:
            if library.mtmd_encode_chunk(context, chunk):
                raise ValueError("mtmd_encode_chunk failed")
            count = library.mtmd_input_chunk_get_n_tokens(chunk)
            return np.ctypeslib.as_array(library.mtmd_get_output_embd(context), (count, width)).copy()
    raise ValueError("llama.cpp makes no picture of the image")


def run(library: Any, job: dict[str, Any]) -> str:
    """Write the output of one job; return an error message, empty on success."""
    _MESSAGES.clear()
    model = library.llama_model_load_from_file(job["path"].encode(), library.llama_model_default_params())
    if not model:
        return "not loaded: " + "; ".join(_MESSAGES[-3:])
    context = library.mtmd_init_from_file(job["mmproj"].encode(), model, parameters(library))
    if not context:
        return "mmproj not loaded: " + "; ".join(_MESSAGES[-3:])
    try:
        width = library.llama_model_n_embd_inp(model)
        np.save(job["out"], embeddings(library, context, np.load(job["image"]), width))
    except ValueError as error:
        return f"{error}: " + "; ".join(_MESSAGES[-3:])
    finally:
        library.mtmd_free(context)
        library.llama_model_free(model)
    return ""


def main() -> None:
    """Run the jobs of the file that the command line names."""
    library = load_library()
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def log(level: int, text: bytes, _: Any) -> None:
        if level >= 3:
            _MESSAGES.append(text.decode("utf-8", "replace").strip())

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)(log)
    for name in ("llama_log_set", "mtmd_log_set", "mtmd_helper_log_set"):
        getattr(library, name)(ctypes.cast(callback, POINTER), None)
    library.llama_backend_init()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps({"path": job["mmproj"], "error": run(library, job)}), flush=True)


if __name__ == "__main__":
    main()
