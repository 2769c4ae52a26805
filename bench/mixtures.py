"""Calibrated mixtures of llama.cpp's types beside llama.cpp's own quantizer with an importance matrix of real text.

    python bench/mixtures.py MODEL TEXT --library LIBRARY.so [--presets Q4_K_M-calibrated ...] [--statistics FILE]

LIBRARY exports ``ggml_quantize_chunk``, as the package xllamacpp does (``make xllamacpp``). Each matrix gets from
llama.cpp the type that it has in Ingot's GGUF file, so that both have the same bits. Windows from the beginning of TEXT
are scored; the importance matrix is of the windows after them. Ingot's statistics are of samples of the model.
The second line of a preset leaves embeddings and the head as they are: neither program has statistics of embeddings.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, quants
from llama import load_quantizer
from rows import Bench, Matrices, write_calibration

import ingot
from ingot.model.statistics import Statistics

PRESETS = ("Q4_K_M-calibrated", "IQ3_S-calibrated", "IQ2_XS-calibrated")
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK = re.compile(r"blk\.([0-9]+)\.(.+)\.weight")


def types_of(path: Path) -> dict[str, GGMLQuantizationType]:
    """Return the types of a GGUF file's matrices by the names of Llama's checkpoints."""
    types = {}
    for tensor in GGUFReader(path).tensors:
        match = BLOCK.fullmatch(tensor.name)
        stem = match[2] if match else tensor.name.removesuffix(".weight")
        if len(tensor.shape) > 1:
            prefix = f"model.layers.{match[1]}." if match else ""
            types[f"{prefix}{NAMES[stem]}.weight"] = GGMLQuantizationType(tensor.tensor_type)
    return types


def by_llama(
    library: ctypes.CDLL, weights: Matrices, types: dict[str, GGMLQuantizationType], importance: Matrices
) -> tuple[int, dict[str, np.ndarray]]:
    """Return the bytes and decoded values of llama.cpp's quantizer; embeddings have no importance, as there."""
    total = 0
    decoded = {}
    for name, kind in types.items():
        rows, cols = weights[name].shape
        elements, size = GGML_QUANT_SIZES[kind]
        out = np.empty((rows, cols // elements * size), np.uint8)
        source = np.ascontiguousarray(weights[name], np.float32)
        scale = importance.get(name)
        pointer = None if scale is None else np.ascontiguousarray(scale, np.float32).ctypes.data
        library.ggml_quantize_chunk(int(kind), source.ctypes.data, out.ctypes.data, 0, rows, cols, pointer)
        total += out.nbytes
        decoded[name] = quants.dequantize(out, kind).reshape(rows, cols)
    return total, decoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--statistics", type=Path, help="of samples of the model, if they were taken")
    parser.add_argument("--samples", type=int, default=96, help="windows of the importance matrix")
    parser.add_argument("--sequences", type=int, default=96, help="windows that are scored")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    library = load_quantizer(given.library)
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(given.model, {"text": given.text}, given.sequences)
        prose = write_calibration(given.model, given.text, folder, given.sequences, given.samples)
        ingot.calibrate(given.model, folder / "prose.safetensors", text=prose, samples=given.samples, fisher=False)
        statistics = given.statistics or folder / "samples.safetensors"
        if given.statistics is None:
            ingot.calibrate(given.model, statistics)
        with Statistics.open(folder / "prose.safetensors") as measured:
            importance = {
                matrix: entry.diagonal for matrix in bench.all if (entry := measured.for_matrix(matrix)) is not None
            }
        for preset in given.presets:
            path = folder / "ours.gguf"
            ingot.convert(given.model, path, preset, calibration=statistics, overwrite=True)
            types = types_of(path)
            total, theirs = by_llama(library, bench.all, types, importance)
            ingot.convert(path, folder / "back", format="safetensors", recipe="decompress", overwrite=True)
            with ingot.open(folder / "back") as checkpoint:
                ours = {matrix: checkpoint[matrix].numpy("f32") for matrix in bench.all if matrix in checkpoint}
            missing = bench.matrices.keys() - ours.keys()
            if missing:
                raise SystemExit(f"the decoded file lacks {sorted(missing)[:3]}")
            kl = {}
            for label, values in (("Ingot", ours), ("llama.cpp", theirs)):
                layers = {matrix: values[matrix] for matrix in bench.matrices}
                kl[label] = bench.of_matrices(total, values)["text"]["kl"]
                kl[f"{label}, layers"] = bench.of_matrices(total, layers)["text"]["kl"]
            bits = 8 * total / sum(bench.all[matrix].size for matrix in types)
            print(f"{preset:22} {bits:6.3f} bits", flush=True)
            for part in ("", ", layers"):
                ours_kl, theirs_kl = kl[f"Ingot{part}"], kl[f"llama.cpp{part}"]
                print(
                    f"  {part[2:] or 'all':8} KL {ours_kl:.5f}, {theirs_kl:.5f} ratio {ours_kl / theirs_kl:.3f}",
                    flush=True,
                )
            figures[preset] = {"bits": bits, **kl}
            if given.json:
                given.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
