"""Weights a second and core that each quantizer rounds, beside another Ingot in the same run.

    python bench/rounding.py --sizes 1024 4096x4096 --beside /path/to/another/.venv/bin/python

Weights are random; so are their inputs and gradients, with a few strong directions and channels of different sizes.
Each grid is rounded in turn by both, each in a process of its own on one thread; processor time counts.
The error is tr(G D A D') of the rounded matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

GRIDS = ("q4_0", "table", "q4_k", "iq4_nl", "trellis")
DAMPING = 0.01


def moment(size: int, random: np.random.Generator) -> np.ndarray:
    """Second moments of ``size`` channels, as ``factors_of`` returns them."""
    strong, samples = max(1, size // 4), 2 * size
    latent = random.standard_normal((samples, strong), np.float32) * np.arange(1, strong + 1, dtype=np.float32) ** -0.5
    channels = latent @ random.standard_normal((strong, size), np.float32)
    channels = channels / channels.std() + 0.5 * random.standard_normal((samples, size), np.float32)
    channels *= np.exp(0.5 * random.standard_normal(size, np.float32))
    result: np.ndarray = channels.T @ channels
    result /= result.diagonal().mean()
    result[np.diag_indices(size)] += np.float32(DAMPING)
    return result


def measure(rows: int, cols: int, name: str) -> dict[str, float]:
    """Round one matrix; return processor seconds, and its error."""
    from ingot.quantization import grid as grids
    from ingot.quantization.factors import Factors
    from ingot.quantization.rounding import round_matrix
    from ingot.quantization.trellis import round_streams

    random = np.random.default_rng(0)
    weights = random.standard_normal((rows, cols), np.float32) * np.float32(0.02)
    inputs, outputs = moment(cols, random), moment(rows, random)
    factors = Factors(inputs, outputs, np.ascontiguousarray(inputs.diagonal()))

    def rounded() -> Any:
        if name == "trellis":
            return round_streams(weights, grids.TrellisGrid(3, 64), factors)
        grid = grids.Grid(3, 64, learnt=True) if name == "table" else grids.GRIDS[name]
        return round_matrix(weights, grid, factors)

    start = time.process_time()
    result = rounded()
    seconds = time.process_time() - start
    change = result.values() - weights
    return {"seconds": seconds, "error": float(np.vdot(change @ inputs, outputs @ change))}


def child(python: str, size: str, name: str) -> dict[str, float]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [python, "-P", str(Path(__file__).absolute()), "--child", size, name]
    found: dict[str, float] = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )
    return found


def shape(size: str) -> tuple[int, int]:
    rows, _, cols = size.partition("x")
    return int(rows), int(cols or rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1024", "4096"], help="rows, or rows x columns")
    parser.add_argument("--grids", nargs="+", default=GRIDS[:-1], choices=GRIDS)
    parser.add_argument("--beside", help="the Python of another Ingot")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        count = shape(size)[0] * shape(size)[1]
        for name in options.grids:
            ours = child(sys.executable, size, name)
            line = f"{size:>10} {name:8} {ours['seconds']:8.2f} s {count / ours['seconds'] / 1e6:8.3f} M weights/s"
            row = {"size": size, "grid": name, **ours}
            if options.beside:
                peer = child(options.beside, size, name)
                row |= {"beside": peer}
                line += f"   beside {peer['seconds']:8.2f} s: {peer['seconds'] / ours['seconds']:5.2f} x"
                line += f", error {ours['error'] / peer['error']:.3f} x"
            print(line, flush=True)
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(*shape(sys.argv[2]), sys.argv[3])))
    else:
        main()
