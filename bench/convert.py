"""Convert a large bf16 checkpoint to INT4 under a RAM ceiling, beside copying the file and running the kernel alone.

    python bench/convert.py --gigabytes 8 --max-ram 1GiB --json convert.json

The checkpoint is generated (seeded Gaussian weights, Llama-like names) in a temporary folder that needs twice its size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from peak import watch

from ingot.codecs.table import CODECS
from ingot.core.runtime.memory import parse_size
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import resolve

ROWS, COLS = 4096, 4096
NAME = "model.layers.{}.mlp.down_proj.weight"


def generate(path: Path, gigabytes: float) -> int:
    """Write a safetensors file of 4096 x 4096 bf16 matrices; returns its weights."""
    count = max(1, round(gigabytes * 1e9 / (ROWS * COLS * 2)))
    names = [NAME.format(index) for index in range(count)]
    size = ROWS * COLS * 2
    header = {
        name: {"dtype": "BF16", "shape": [ROWS, COLS], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    matrix = (np.random.default_rng(0).standard_normal((ROWS, COLS), np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index in range(count):
            file.write(np.roll(matrix, index, axis=0).view(np.uint16).tobytes())
    return count * ROWS * COLS


def copy_seconds(source: Path, target: Path, *, flush: bool) -> float:
    """Read and write the file once, as ``cp`` does; ``flush`` waits for the disk, as ``convert`` does at its end."""
    started = time.perf_counter()
    shutil.copyfile(source, target)
    if flush:
        with target.open("rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def kernel_seconds(weights: int, recipe: str) -> float:
    """Quantize as many weights as the recipe says, one thread, from memory to memory."""
    choice = resolve(load_recipe(recipe), NAME.format(1), (ROWS, COLS), "bf16", 3).choice
    if choice is None:
        sys.exit("expected a recipe that quantizes feed-forward matrices")
    matrix = (np.random.default_rng(0).standard_normal((ROWS, COLS), np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    encoder = CODECS[choice.codec].encoder((ROWS, COLS), "bf16", choice.options)
    encoder.encode(matrix[:256])
    rows = 256
    started = time.perf_counter()
    for start in range(0, ROWS, rows):
        encoder.encode(matrix[start : start + rows])
    return (time.perf_counter() - started) * weights / (ROWS * COLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--max-ram", default="1GiB")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to make the files (default: the system's temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source, target = folder / "source.safetensors", folder / "target.zt"
        weights = generate(source, arguments.gigabytes)
        command = [sys.executable, "-m", "ingot.cli.main", "convert", str(source), str(target)]
        command += ["--recipe", arguments.recipe, "--max-ram", arguments.max_ram, "--json"]
        results = {"weights": weights, "source_bytes": source.stat().st_size}
        results["copy_seconds"] = copy_seconds(source, folder / "copy", flush=False)
        results["copy_flushed_seconds"] = copy_seconds(source, folder / "copy", flush=True)
        results["kernel_seconds"] = kernel_seconds(weights, arguments.recipe)
        for label, extra in (
            ("convert", []),
            ("convert_no_measure", ["--no-measure"]),
            ("convert_one_thread", ["--threads", "1"]),
        ):
            target.unlink(missing_ok=True)
            run = watch([*command, *extra])
            if run.code:
                sys.exit(run.stderr)
            results[f"{label}_seconds"] = run.seconds
            results[f"{label}_peak_anonymous"] = run.peak_anonymous
        results["ceiling"] = parse_size(arguments.max_ram)
    print(f"{weights / 1e9:.2f} G weights, {results['source_bytes'] / 1e9:.2f} GB bf16, recipe {arguments.recipe}")
    for key, value in results.items():
        if key.endswith("_seconds"):
            print(f"  {key:28} {value:8.2f} s   {value / results['copy_seconds']:.2f} x copying the file")
        elif key.endswith("_anonymous"):
            print(f"  {key:28} {value / 2**20:8.0f} MiB of {results['ceiling'] / 2**20:.0f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
