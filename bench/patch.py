"""Making and applying deltas from files, beside the package deltatensors on the same pair in the same run.

    python bench/patch.py --gigabytes 1 --json patch.json

The pair: matrices of 4096 x 4096 in bf16, two shards, page cache warm; the fine-tune is the base with noise of a
hundredth of its spread. The peer patches into memory; Ingot patches into files, and also into arrays in memory. Every
call runs in a process of its own, so that its peak memory can be told; the best time of ``--repeat`` counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import ingot
from ingot.core.numeric.dtypes import cast

STRATEGIES = ("int4", "quantized", "sparse")
SIDE = 4096
Row = dict[str, Any]

# Runs one statement and prints its seconds and what the process took at most beside what it had before, in bytes
# (mapped pages of the files count too).
CHILD = """
import json, sys, time
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
base, tuned, delta, out, strategy = sys.argv[1:6]
{prepare}
before = peak()
started = time.perf_counter()
{work}
seconds = time.perf_counter() - started
print("FIGURES", json.dumps([seconds, peak() - before]))
"""
PEER = "import deltatensors as peer, torch, safetensors"
OURS = "import ingot; ingot.diff, ingot.patch, ingot.apply_delta, ingot.open"
WAYS = {
    "deltatensors diff": (PEER, "peer.save_delta_from_paths(delta, tuned, base, strategy=strategy)"),
    "deltatensors patch": (PEER, "peer.load_delta_from_paths(delta, base)"),
    "deltatensors patch, base not verified": (PEER, "peer.load_delta_from_paths(delta, base, verify=False)"),
    "ingot diff": (OURS, "ingot.diff(base, tuned, delta, strategy)"),
    "ingot diff, errors not measured": (OURS, "ingot.diff(base, tuned, delta, strategy, measure=False)"),
    "ingot patch to files": (OURS, "ingot.patch(base, delta, out, overwrite=True)"),
    "ingot patch to files, base not verified": (
        OURS,
        "ingot.patch(base, delta, out, verify_base=False, overwrite=True)",
    ),
    "ingot apply in memory": (
        OURS + "\nstate = {name: tensor.numpy().copy() for name, tensor in ingot.open(base).items()}",
        "ingot.apply_delta(state, delta)",
    ),
}


def make_pair(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    """Write base and fine-tune, two shards each."""
    rng = np.random.default_rng(0)
    count = max(2, round(gigabytes * 1e9 / (2 * SIDE * SIDE)))
    base, tuned = folder / "base", folder / "tuned"
    for path in (base, tuned):
        path.mkdir()
    for shard in range(2):
        first: dict[str, np.ndarray] = {}
        second: dict[str, np.ndarray] = {}
        for index in range(shard * count // 2, (shard + 1) * count // 2):
            weights = rng.standard_normal((SIDE, SIDE), np.float32) * np.float32(0.02)
            noise = rng.standard_normal((SIDE, SIDE), np.float32) * np.float32(0.0002)
            name = f"model.layers.{index}.mlp.up_proj.weight"
            first[name], second[name] = cast(weights, "bf16"), cast(weights + noise, "bf16")
        name = f"model-{shard + 1:05}-of-00002.safetensors"
        ingot.save(base / name, first)
        ingot.save(tuned / name, second)
    for path in (base, tuned):
        index_shards(path)
    return base, tuned


def index_shards(folder: Path) -> None:
    """Write the index of a sharded checkpoint."""
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        with ingot.open(file) as shard:
            places |= dict.fromkeys(shard, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def run(way: str, base: Path, tuned: Path, delta: Path, out: Path, strategy: str, repeat: int) -> Row:
    """Time one way in fresh processes."""
    prepare, work = WAYS[way]
    figures = []
    for _ in range(repeat):
        code = CHILD.format(prepare=prepare, work=work)
        command = [sys.executable, "-c", code, *map(str, (base, tuned, delta, out)), strategy]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"name": way, "strategy": strategy, "failed": done.stderr.strip().splitlines()[-1][:200]}
        line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES"))
        figures.append(json.loads(line.removeprefix("FIGURES")))
    seconds, peak = min(figure[0] for figure in figures), min(figure[1] for figure in figures)
    return {"name": way, "strategy": strategy, "seconds": round(seconds, 3), "peak_extra": peak}


def compare(base: Path, tuned: Path, folder: Path, repeat: int) -> list[Row]:
    """Run every way of every strategy, and the exact one; print ratios to the peer's time."""
    rows: list[Row] = []
    for strategy in (*STRATEGIES, "exact"):
        theirs: dict[str, float] = {}
        for way in WAYS:
            peer = way.startswith("deltatensors")
            if peer and strategy == "exact":
                continue
            suffix = "zt" if strategy == "exact" else "wdelta"
            delta = folder / f"{'peer' if peer else 'ours'}-{strategy}.{suffix}"
            row = run(way, base, tuned, delta, folder / "out", strategy, repeat)
            if "seconds" in row and peer:
                theirs["diff" if "diff" in way else "patch"] = row["seconds"]
            row["ratio"] = ratio(row, theirs)
            whole = sum(file.stat().st_size for file in tuned.glob("*.safetensors"))
            row["share"] = delta.stat().st_size / whole if delta.exists() else None
            rows.append(row)
            print(text(row), flush=True)
    return rows


def ratio(row: Row, theirs: dict[str, float]) -> float | None:
    """Return how many times faster than the peer's comparable call."""
    if row["name"].startswith("deltatensors") or "seconds" not in row:
        return None
    key = "diff" if "diff" in row["name"] else "patch"
    return round(theirs[key] / row["seconds"], 1) if key in theirs else None


def text(row: Row) -> str:
    if "failed" in row:
        return f"  {row['strategy']:<10} {row['name']:<40} failed: {row['failed']}"
    faster = f"{row['ratio']:5.1f} x faster" if row["ratio"] else ""
    peak = f"{row['peak_extra'] / 2**20:7.0f} MiB"
    return f"  {row['strategy']:<10} {row['name']:<40} {row['seconds']:7.2f} s {peak}  {row['share']:.3f}  {faster}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to make the files; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        started = time.perf_counter()
        base, tuned = make_pair(Path(name), options.gigabytes)
        print(
            f"pair of {options.gigabytes:g} GB made in {time.perf_counter() - started:.0f} s; best of {options.repeat}"
        )
        rows = compare(base, tuned, Path(name), options.repeat)
    if options.json:
        options.json.write_text(json.dumps({"gigabytes": options.gigabytes, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
