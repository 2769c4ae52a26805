"""ggml's blocks beside llama.cpp and gguf-py: encoding, decoding, and a model's perplexity by both programs.

    python bench/llama.py --python .venv.llama/bin/python --model MODEL --text TEXT --json llama.json

``make interop-llama`` makes that Python. Encoders and decoders are timed in turn in one process, on two threads and on
one; figures are of processor time, of all threads together. llama.cpp's encoder is ``ggml_quantize_chunk``, which its
quantizer calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from clock import turns
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

import ingot
from ingot.codecs.blocks.codec import EXACT, LEVELS, REFERENCE, BlocksCodec
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.evaluation.windows import read_windows
from ingot.runtime.loading.options import Protocol
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

Row = dict[str, Any]
PROGRAM = Path(__file__).parents[1] / "tests" / "interop" / "llama_program.py"
WINDOW = 256


def library(python: str) -> ctypes.CDLL:
    """Return the library of llama.cpp that the other Python's package has."""
    where = "import importlib.util as u; print(u.find_spec('llama_cpp').submodule_search_locations[0])"
    folder = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    return load_quantizer(Path(folder, "lib", "libggml-base.so"))


def load_quantizer(path: Path) -> ctypes.CDLL:
    """Load a library that exports ``ggml_quantize_chunk``, such as that of the package xllamacpp."""
    loaded = ctypes.CDLL(str(path))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    return loaded


def encoding(python: str, rows: int, repeat: int) -> list[Row]:
    llama, shape = library(python), (rows, 4096)
    weights = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.05)
    found = []
    with ThreadPoolExecutor(2) as pool:
        for kind in LEVELS:
            number = int(GGMLQuantizationType[kind.upper()])
            elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
            out = np.empty(weights.size // elements * nbytes, np.uint8)

            def half(part: int, number: int = number, out: np.ndarray = out) -> None:
                some, start = rows // 2, part * (rows // 2) * 4096
                llama.ggml_quantize_chunk(number, weights.ctypes.data, out.ctypes.data, start, some, 4096, None)

            searches = (True, REFERENCE) if kind in EXACT else (True,)
            encoders = [BlocksCodec().encoder(shape, "f32", {"type": kind, "search": search}) for search in searches]
            encoder, ways = encoders[0], [partial(encoder.encode, weights) for encoder in encoders]
            theirs, ours, *plain = turns(
                repeat, lambda h=half: list(pool.map(h, (0, 1))), *ways, clock=time.process_time
            )
            made = [error(weights, kind, np.asarray(blocks)) for blocks in (encoder.encode(weights)["blocks"], out)]
            rates = {"ours": weights.size / ours / 1e6, "llama.cpp": weights.size / theirs / 1e6}
            row = {"type": kind, **rates, "times": theirs / ours, "error": made[0] / made[1]}
            found.append({**row, **({"without search, times": theirs / plain[0]} if plain else {})})
    return found


def blocks_tensor(kind: str, shape: tuple[int, int], blocks: np.ndarray) -> Tensor:
    part = memory_part(blocks.reshape(-1).view(np.uint8), "u8")
    return Tensor.from_parts(GgmlBlocksLayout(kind), {"blocks": part}, shape, "w")


def error(weights: np.ndarray, kind: str, blocks: np.ndarray) -> float:
    values = BlocksCodec().decode(blocks_tensor(kind, weights.shape, blocks), "f32")
    return float(np.square(values.astype(np.float64) - weights).sum())


def decoding(rows: int, repeat: int) -> list[Row]:
    """Of random bytes whose scales are finite, for every type that gguf-py decodes; and a copy of the values."""
    found, rng = [], np.random.default_rng(1)
    out, values = np.ones((rows, 4096), np.float32), np.ones((rows, 4096), np.float32)
    for kind, (elements, nbytes, _) in TYPES.items():
        peer = getattr(GGMLQuantizationType, kind.upper(), None)
        if peer is None:
            continue
        packed = rng.integers(0, 0x40, (rows, 4096 // elements * nbytes), np.uint8)
        try:
            quants.dequantize(packed[:1], peer)
        except NotImplementedError:
            continue
        tensor = blocks_tensor(kind, (rows, 4096), packed)
        ours, theirs, copy = turns(
            repeat,
            lambda t=tensor: BlocksCodec().decode(t, "f32", out),
            lambda p=packed, k=peer: quants.dequantize(p, k),
            lambda: np.copyto(out, values),
            clock=time.process_time,
        )
        rate = 4 * rows * 4096 / 1e9
        row = {"type": kind, "ours": rate / ours, "gguf-py": rate / theirs, "times": theirs / ours}
        found.append({**row, "copy": rate / copy, "of a copy": copy / ours})
    return found


def perplexities(python: str, model: Path, text: Path, windows: int) -> list[Row]:
    """Of the same file in both programs; keys and values in f32."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        protocol = Protocol(window=WINDOW, sequences=windows)
        cut = read_windows(load_tokenizer(model), text, protocol).tokens.tolist()
        for recipe in ("f16", "q8_0", "q4_0"):
            file, jobs = folder / f"{recipe}.gguf", folder / "jobs.json"
            ingot.convert(model, file, recipe)
            jobs.write_text(json.dumps([["loss", str(file), cut]]))
            answer = subprocess.run([python, str(PROGRAM), str(jobs)], capture_output=True, text=True, check=True)
            theirs = float(np.exp(json.loads(answer.stdout.splitlines()[-1])[0]))
            ours = evaluate(file, text, None, protocol).perplexity
            size = file.stat().st_size
            found.append({"type": recipe, "bytes": size, "ours": ours, "llama.cpp": theirs})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python that has llama_cpp")
    parser.add_argument("--model", type=Path, help="a model's folder, for perplexities")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--rows", type=int, default=512, help="rows of 4096 weights (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {
        "encoding, M weights/s": encoding(arguments.python, arguments.rows, arguments.repeat),
        "decoding, GB/s of f32": decoding(arguments.rows, arguments.repeat),
    }
    if arguments.model and arguments.text:
        found = perplexities(arguments.python, arguments.model, arguments.text, arguments.windows)
        results["perplexity"] = found
    for title, rows in results.items():
        print(title)
        for row in rows:
            print(
                "  " + "  ".join(f"{key} {value:.4g}" if key != "type" else f"{value:8}" for key, value in row.items())
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
