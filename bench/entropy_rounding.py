"""Integers chosen so that they code well: KL against stored bits, beside the trellis.

    python bench/entropy_rounding.py MODEL --text heldout.txt

Matrices of attention and feed-forward networks are rounded to integers without a limit, times a factor for each row
and each column: ``1 / sqrt(weight of an error)`` after feedback in both directions, so that all errors weigh the same.
Codes are chosen by the error plus a price for their length, with the lengths of the codes of a first pass, and are
coded by the kernel of ``ingot.packed/1`` in eight contexts of the expected size. "Bits" are all stored bytes: codes,
tables, and two bytes for each row and column. Statistics are of samples of the model, the same for all rows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rows import Bench, Row, integers

import ingot
from ingot.core.runtime import native
from ingot.model.statistics import Statistics
from ingot.quantization.factors import Factors, factors_of, feedback_factor

CONTEXTS = 8
LARGEST = 127
Array = np.ndarray[Any, Any]


class Problem(NamedTuple):
    """A matrix in units in which all errors weigh the same, and both triangular factors in these units."""

    weights: Array
    upper: Array
    outputs: Array
    step: float  # the weight units of a code, but for the factors of its row and column
    rows: Array
    cols: Array
    contexts: Array


def problem(weights: Array, factors: Factors, by_column: bool) -> Problem:
    """Return a matrix divided by its factors, so that the squared error is what remains after both feedbacks.

    Without ``by_column`` only rows have factors, as in codecs that have no factors of columns.
    """
    upper, diagonal, _ = feedback_factor(factors.new_inputs)
    upper = np.triu(upper, 1)
    if factors.outputs is None:
        raise SystemExit("expected statistics with gradients")
    outputs, weight, _ = feedback_factor(lambda: np.array(factors.outputs))
    outputs = np.triu(outputs, 1)
    rows = np.float16(np.sqrt(weight.mean() / weight)).astype(np.float64)
    cols = np.float16(np.sqrt(diagonal.mean() / diagonal)).astype(np.float64) if by_column else np.ones(len(diagonal))
    step = float(np.sqrt(1 / (weight.mean() * diagonal.mean())))
    scaled = weights / (rows[:, None] * cols)
    # E' = E / (rows cols): E U becomes E' (diag(cols) U / cols), and likewise for rows
    upper = upper * cols[:, None] / cols
    outputs = outputs * rows[:, None] / rows
    size = np.sqrt((scaled**2).mean(1, keepdims=True) * (scaled**2).mean(0) / (scaled**2).mean())
    limits = np.quantile(size, np.arange(1, CONTEXTS) / CONTEXTS)
    return Problem(scaled, upper, outputs, step, rows, cols, np.searchsorted(limits, size).astype(np.uint8))


def kernel(folder: Path) -> Any:
    """Return the function that chooses codes, compiled in ``folder``."""
    source = Path(__file__).with_suffix(".c")
    library = folder / "kernel.so"
    subprocess.run(["cc", "-O3", "-ffast-math", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library)).choose_codes


def chosen(choose: Any, item: Problem, step: float, bounds: Array) -> Array:
    """Return codes by feedback in both directions; from the size ``bounds[context, code]`` on a code is larger."""
    codes = np.empty(item.weights.shape, np.int8)
    arrays = [
        np.ascontiguousarray(array) for array in (item.weights, item.upper.T, item.outputs.T, bounds, item.contexts)
    ]
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, codes)]
    sizes = [ctypes.c_size_t(size) for size in codes.shape]
    number = ctypes.c_size_t(bounds.shape[1])
    if choose(*sizes, *addresses[:3], ctypes.c_double(step), addresses[3], number, *addresses[4:]):
        raise MemoryError
    return codes


def nearest(item: Problem, step: float) -> Array:
    """Return codes by feedback along columns alone: a first pass, for the lengths of codes."""
    errors = np.zeros_like(item.weights)
    codes = np.zeros(item.weights.shape, np.int8)
    for k in range(item.weights.shape[1]):
        target = item.weights[:, k] - errors[:, :k] @ item.upper[:k, k]
        codes[:, k] = np.clip(np.rint(target / step), -LARGEST, LARGEST)
        errors[:, k] = codes[:, k] * step - item.weights[:, k]
    return codes


def bounds_of(codes: Array, contexts: Array, price: float) -> Array:
    """Return for each context the sizes from which on the next larger code costs less: error plus length."""
    result = []
    for context in range(CONTEXTS):
        counts = np.bincount(np.abs(codes[contexts == context]).astype(np.int64), minlength=LARGEST + 1) + 0.5
        counts[1:] /= 2  # by sign
        lengths = -np.log2(counts / (counts[0] + 2 * counts[1:].sum()))
        bounds = np.arange(LARGEST) + 0.5 + price * np.diff(lengths) / 2
        result.append(np.maximum.accumulate(bounds))
    return np.stack(result)


def coded_bytes(codes: Array, contexts: Array) -> int:
    """Return the bytes of codes by the kernel of ``ingot.packed/1``."""
    symbols = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
    total = 0
    for start in range(0, len(symbols), 1 << 19):
        piece = np.ascontiguousarray(symbols[start : start + (1 << 19)])
        out = np.empty(2 * len(piece) + 4096, np.uint8)
        by = np.ascontiguousarray(contexts.reshape(-1)[start : start + (1 << 19)])
        total += native.kernels.symbols_encode(piece, 1, by, CONTEXTS, False, out)
    return total + 2 * sum(codes.shape)


def measure(bench: Bench, choose: Any, problems: dict[str, Problem], coarse: float, price: float) -> dict[str, Any]:
    """Return the figures of all matrices with the step ``coarse``, one for the model, and a price of a bit."""
    values, nbytes = {}, 0
    for name, item in problems.items():
        step = coarse * item.step
        first = nearest(item, step)
        codes = chosen(choose, item, step, bounds_of(first, item.contexts, price))
        nbytes += coded_bytes(codes, item.contexts)
        values[name] = (codes * step * item.rows[:, None] * item.cols).astype(np.float32)
    return bench.of_matrices(nbytes, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--group", type=int, default=96)
    parser.add_argument("--steps", type=float, nargs="+", required=True)
    parser.add_argument("--prices", type=float, nargs="+", default=[0.0, 0.115])
    parser.add_argument("--columns", action=argparse.BooleanOptionalAction, default=True, help="factors of columns")
    parser.add_argument("--trellis", type=int, nargs="*", default=[4, 3], help="bits of the trellis")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options.model, {"text": options.text}, options.windows)
    rows = []

    def show(label: str, figures: dict[str, Any]) -> None:
        rows.append({"label": label, **figures})
        print(f"{label:50} {figures['bits']:.3f} bits  KL {figures['text']['kl']:.5f}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        choose = kernel(Path(temporary))
        statistics = options.statistics or Path(temporary) / "statistics.safetensors"
        if options.statistics is None:
            ingot.calibrate(options.model, statistics)
        for bits in options.trellis:
            row = Row(f"trellis of {bits} bits", "trellis", integers(bits, options.group), "two-sided")
            show(row.label, bench.of_row(row, statistics, Path(temporary)))
        with Statistics.open(statistics) as opened:
            problems = {}
            for name, weights in bench.matrices.items():
                found = opened.for_matrix(name)
                if found is None:
                    raise SystemExit(f"expected statistics of {name}")
                factors = factors_of(found)
                item = problem(weights.astype(np.float64), factors, options.columns)
                problems[name] = item._replace(step=item.step / np.sqrt(factors.scale))
            for coarse in options.steps:
                for price in options.prices:
                    label = f"coded integers, step {coarse:g}, price {price:g}"
                    show(label, measure(bench, choose, problems, coarse, price))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
