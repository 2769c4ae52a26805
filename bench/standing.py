"""Bits against quality, beside other programs: one model's matrices by every grid, KL and perplexity on several texts.

    python bench/standing.py MODEL TEXTS --library LIBRARY.so --peers .venv.peers/bin/python --json out.json

TEXTS has ``heldout_prose.txt`` and ``heldout_code.txt``; with ``--chat`` there is a third text. LIBRARY exports
``ggml_quantize_chunk``, as the package xllamacpp does (``make xllamacpp``); ``make peers`` makes the other Python.
Matrices of attention and feed-forward networks are rounded, the others are unchanged. "Bits" are those of these
matrices as stored: codes, scales and tables. "File bits" also count the other tensors, in 16 bits, over all weights.
Statistics of Ingot are of samples of the model. Other programs get prose: the text after the scored windows.
``tools/quality_page.py`` makes ``spec/quality.md`` from the JSON file; a row that the file has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from llama import load_quantizer
from rows import ASIDE, WINDOWS, Bench, Row, blocks, integers, write_calibration
from safetensors.numpy import load_file

import ingot
from ingot.model.statistics import Statistics

Figures = dict[str, Any]
PEERS = Path(__file__).with_name("standing_peers.py")
# What llama-quantize takes where 256 does not divide a matrix's columns (llama.cpp, src/llama-quant.cpp).
INSTEAD = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
LLAMA = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_1", "IQ4_NL", "Q4_0", "IQ4_XS", "Q3_K", "IQ3_S", "IQ3_XXS",
         "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M")  # fmt: skip
BLIND = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_1", "IQ4_NL", "Q4_0", "IQ4_XS", "Q3_K", "IQ3_S", "IQ3_XXS",
         "Q2_K", "IQ2_S")  # fmt: skip
"""Types that llama.cpp also makes without an importance matrix."""


def ours(columns: set[int]) -> Iterator[Row]:
    """Yield rows of ours for matrices of so many columns."""
    yield Row("INT8 rows", "affine", '{ bits = 8, group = "row" }')
    for group in (each for each in (32, 64, 96, 128) if all(cols % each == 0 for cols in columns)):
        for bits in (6, 5, 4, 3, 2):
            yield Row(f"INT{bits} g{group}", "affine", integers(bits, group, ', quantizer = "mse"'))
            yield Row(f"INT{bits} g{group}", "affine", integers(bits, group), "two-sided")
        for bits in (4, 3, 2):
            yield Row(f"INT{bits} g{group} with zeros", "affine", integers(bits, group, ASIDE), "two-sided")
            yield Row(f"table of {bits} bits, g{group}", "scaled_codebook", integers(bits, group), "two-sided")
            yield Row(f"trellis of {bits} bits, g{group}", "trellis", integers(bits, group), "two-sided")
    for kind in ("q8_0", "q4_1", "q4_0", "iq4_nl"):
        yield Row(kind.upper(), "ggml_blocks", blocks(kind))
        yield Row(kind.upper(), "ggml_blocks", blocks(kind), "two-sided")
    for kind in ("q6_k", "q5_k", "q4_k", "iq4_xs", "q3_k", "q2_k"):
        for quantizer in ("", "two-sided"):
            yield Row(kind.upper(), "ggml_blocks", blocks(INSTEAD[kind.upper()].lower()), quantizer, kind)


def by_llama(bench: Bench, llama: Any, kind: str, importance: Mapping[str, np.ndarray] | None) -> Figures:
    """By ``ggml_quantize_chunk``, which llama.cpp's own quantizer calls, and read back by gguf-py."""
    total, found = 0, {}
    for name, weights in bench.matrices.items():
        rows, cols = weights.shape
        taken = GGMLQuantizationType[
            kind if cols % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0 else INSTEAD[kind]
        ]
        elements, size = GGML_QUANT_SIZES[taken]
        out = np.empty((rows, cols // elements * size), np.uint8)
        diagonal = None if importance is None else np.ascontiguousarray(importance[name], np.float32)
        llama.ggml_quantize_chunk(
            int(taken), weights.ctypes.data, out.ctypes.data, 0, rows, cols,
            None if diagonal is None else diagonal.ctypes.data,
        )  # fmt: skip
        total += out.nbytes
        found[name] = quants.dequantize(out, taken).reshape(rows, cols)
    return bench.of_matrices(total, found)


def by_peer(bench: Bench, python: str, folder: Path, kind: str) -> Figures:
    """By another package in a Python of its own."""
    out = folder / "peer.safetensors"
    asked = [Path(python).absolute(), "-P", PEERS.absolute(), kind, bench.path.absolute(), folder, out]
    # GPTQModel leaves logs where it runs.
    done = subprocess.run([str(part) for part in asked], capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
    return bench.of_matrices(int(done.stdout.splitlines()[-1]), load_file(out))


def rows_of(bench: Bench, given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, Callable[[], Figures]]]:
    """Yield every row: its name, whose it is, and what makes it."""
    text, scored = given.texts / "heldout_prose.txt", len(bench.windows["prose"])
    prose = write_calibration(given.model, text, folder, scored, given.calibration)
    samples = given.statistics
    if samples is None:
        samples = folder / "samples.safetensors"
        ingot.calibrate(given.model, samples)
    for row in ours({each.shape[1] for each in bench.matrices.values()}):
        label = f"{row.label}, {row.quantizer}" if row.quantizer else row.label
        yield label, "Ingot", partial(bench.of_row, row, samples, folder)
    if given.library:
        ingot.calibrate(given.model, folder / "prose.safetensors", text=prose, samples=given.calibration, fisher=False)
        with Statistics.open(folder / "prose.safetensors") as statistics:
            importance = {name: statistics.for_matrix(name).diagonal for name in bench.matrices}
        llama = load_quantizer(given.library)
        for kind in BLIND:
            yield kind, "llama.cpp", partial(by_llama, bench, llama, kind, None)
        for kind in LLAMA:
            yield f"{kind} imatrix", "llama.cpp", partial(by_llama, bench, llama, kind, importance)
    if given.peers:
        listed = subprocess.run(
            [given.peers, "-P", str(PEERS), "list", str(given.model)], capture_output=True, text=True, check=True
        )
        for kind in listed.stdout.splitlines():
            yield kind, kind.split()[0], partial(by_peer, bench, given.peers, folder, kind)


def windows_of(text: str) -> dict[str, int]:
    """Return the number of windows by the name of a text."""
    return {name: int(count) for name, count in (item.split("=") for item in text.split(","))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--library", type=Path, help="exports ggml_quantize_chunk")
    parser.add_argument("--peers", help="a Python that has hqq, gptqmodel, bitsandbytes and MLX")
    parser.add_argument("--statistics", type=Path, help="of the model's samples, if they were taken")
    parser.add_argument("--json", type=Path, required=True, help="where figures are kept; rows that it has stay")
    parser.add_argument("--chat", type=Path, help="a third text")
    parser.add_argument("--windows", type=windows_of, default={}, help="such as prose=24,code=8; default 96 each")
    parser.add_argument("--calibration", type=int, default=96, help="windows of prose that other programs get")
    parser.add_argument("--only", nargs="+", default=[""], help="patterns: rows in whose program and name one is found")
    given = parser.parse_args(arguments)
    texts = {name: given.texts / f"heldout_{name}.txt" for name in ("prose", "code")}
    if given.chat:
        texts["chat"] = given.chat
    bench = Bench(given.model, texts, {name: given.windows.get(name, WINDOWS) for name in texts})
    figures: dict[str, Any] = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {"rows": []}
    figures["weights"], figures["rounded"] = bench.weights, bench.weights - bench.rest
    figures["calibration windows"] = given.calibration
    figures["windows"] = {name: len(windows) for name, windows in bench.windows.items()}
    have = {(row["by"], row["name"]) for row in figures["rows"]}
    with tempfile.TemporaryDirectory() as name:
        rows = list(rows_of(bench, given, Path(name)))
        for label, who, make in (
            row for pattern in given.only for row in rows if re.search(pattern, f"{row[1]} {row[0]}")
        ):
            if (who, label) in have:
                continue
            have.add((who, label))
            row = {"name": label, "by": who, **make()}
            print(
                f"{who:12} {label:40} {row['bits']:6.3f} {row['prose']['kl']:9.5f} {row['code']['kl']:9.5f}", flush=True
            )
            figures["rows"].append(row)
            given.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
