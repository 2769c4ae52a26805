"""What a tensor costs: operations on 100 to 100,000 small ones, and on some of several sizes, beside ``safetensors``.

    python bench/many.py --counts 100 1000 10000 100000 --edges 16 256 1024 --json many.json

Each operation runs in a process of its own, on tensors of 512 bytes, and on ``--some`` matrices of each edge. Its row
is the processor time and the peak of memory above those of the same operation on one tensor, divided by the number of
tensors. It runs on the one tensor first, in the same process: so imports do not count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

import ingot
import ingot.numpy
from ingot.core.memory import peak_rss

EDGE = 16
FEW = 5  # runs where what is left of a difference is little


def make(path: Path, count: int, edge: int, seed: int = 0) -> None:
    """Write so many f16 matrices of ``edge`` rows and columns under the names of a model of experts."""
    rng = np.random.default_rng(seed)
    names = (f"model.layers.{index // 64}.mlp.experts.{index % 64}.w{index}.weight" for index in range(count))
    save_file({name: rng.integers(0, 0x3C00, (edge, edge), np.uint16).view(np.float16) for name in names}, path)


def operations(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what is measured; the sources of ``prepare`` lie in the folder."""
    dense, zt, tuned = (folder / name for name in ("source.safetensors", "source.zt", "tuned.safetensors"))
    two, squizd, delta = (folder / name for name in ("two.zt", "source.squizd", "delta.wdelta"))
    return {
        "list .zt": lambda: list(ingot.open(zt).values()),
        "load .zt": lambda: ingot.numpy.load_file(zt),
        "load .safetensors": lambda: ingot.numpy.load_file(dense),
        "safetensors loads": lambda: load_file(dense),
        "load .zt 2": lambda: ingot.numpy.load_file(two),
        "load .squizd": lambda: ingot.numpy.load_file(squizd),
        "verify .zt": lambda: ingot.verify(zt),
        "verify .zt 2": lambda: ingot.verify(two),
        "verify .squizd": lambda: ingot.verify(squizd),
        "verify .wdelta": lambda: ingot.verify(delta),
        "compare both": lambda: ingot.compare(dense, zt),
        "convert to .zt": lambda: ingot.convert(dense, folder / "result.zt", overwrite=True),
        "convert to .zt 2": lambda: ingot.convert(dense, folder / "result.zt", container="2", overwrite=True),
        "convert to .squizd": lambda: ingot.convert(dense, folder / "result.squizd", overwrite=True),
        "convert .safetensors": lambda: ingot.convert(zt, folder / "result.safetensors", overwrite=True),
        "diff to .wdelta": lambda: ingot.diff(
            dense, tuned, folder / "result.wdelta", strategy="sparse", measure=False, overwrite=True
        ),
        "apply .wdelta": lambda: ingot.patch(dense, delta, folder / "result.safetensors", overwrite=True),
    }


def measure_here(one: Path, folder: Path, name: str) -> dict[str, float]:
    """Run one operation in this process, which has run it on one tensor."""
    operations(one)[name]()
    operation = operations(folder)[name]
    before, started, memory = time.process_time(), time.perf_counter(), peak_rss()
    kept = operation()
    spent, seconds = time.process_time() - before, time.perf_counter() - started
    del kept
    return {"processor": spent, "wall": seconds, "memory": peak_rss() - memory}


def measure(one: Path, folder: Path, name: str, repeat: int) -> dict[str, float]:
    """Run one operation in processes of its own; return the least that it took."""
    command = [sys.executable, __file__, "--here", str(one), str(folder), name]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(repeat)
    ]
    return {key: min(run[key] for run in runs) for key in runs[0]}


def prepare(root: Path, count: int, edge: int) -> Path:
    """Make the sources of so many tensors."""
    folder = root / f"{count}x{edge}"
    folder.mkdir()
    make(folder / "source.safetensors", count, edge)
    make(folder / "tuned.safetensors", count, edge, 1)
    source = folder / "source.safetensors"
    ingot.convert(source, folder / "source.zt", measure=False)
    ingot.convert(source, folder / "two.zt", container="2", measure=False)
    ingot.convert(source, folder / "source.squizd", measure=False)
    ingot.diff(source, folder / "tuned.safetensors", folder / "delta.wdelta", strategy="sparse", measure=False)
    return folder


Costs = dict[str, dict[int, dict[str, float]]]


def run(counts: Sequence[int], edges: Sequence[int], some: int) -> tuple[Costs, Costs]:
    """Return by operation what a tensor costs: by the number of small ones, and by the bytes of ``some``."""
    by_count: Costs = {}
    by_bytes: Costs = {}
    with tempfile.TemporaryDirectory() as temporary:
        one = prepare(Path(temporary), 1, EDGE)
        base = {name: measure(one, one, name, FEW) for name in operations(one)}
        cases = [(count, EDGE, by_count, count) for count in counts]
        cases += [(some, edge, by_bytes, 2 * edge * edge) for edge in edges]
        for count, edge, found, key in cases:
            folder = prepare(Path(temporary), count, edge)
            for name, fixed in base.items():
                each = measure(one, folder, name, FEW if count <= 1000 else 1)
                found.setdefault(name, {})[key] = {kind: (each[kind] - fixed[kind]) / count for kind in each}
            shutil.rmtree(folder)
    return by_count, by_bytes


def show(title: str, found: Costs) -> None:
    """Print one table."""
    print(title)
    keys = next(iter(found.values()), {})
    print(f"{'':20}" + "".join(f"{key:>18,}" for key in keys))
    for name, rows in found.items():
        cells = [f"{row['processor'] * 1e6:.1f} ({row['memory']:.0f})" for row in rows.values()]
        print(f"{name:20}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--edges", type=int, nargs="*", default=[16, 256, 1024])
    parser.add_argument("--some", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measure_here(Path(asked.here[0]), Path(asked.here[1]), asked.here[2])))
        return
    by_count, by_bytes = run(asked.counts, asked.edges, asked.some)
    show("µs of processor time a tensor (bytes of memory), by their number", by_count)
    show(f"the same, by the bytes of each of {asked.some}", by_bytes)
    if asked.json:
        result: dict[str, Any] = {"shape": [EDGE, EDGE], "some": asked.some}
        result |= {"operations": by_count, "by_bytes": by_bytes}
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
