"""Loading dense files into owned arrays, beside ``safetensors`` and ``ztensor`` on the same tensors in the same run.

    python bench/load.py --gigabytes 1 --json load.json

Files are made in a temporary folder that needs three times the size. Each way is tried ``--repeat`` times in turn with
the others and its best time counts; "cold" asks the system to forget the file's pages before each try.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import ztensor
import ztensor.numpy

import ingot
import ingot.numpy
from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.owned_arrays import load_arrays
from ingot.core.runtime.parallel import default_workers

Way = tuple[str, Path, Callable[[Path], Any]]


def tensors(gigabytes: float) -> dict[str, np.ndarray]:
    """Llama-like f16 tensors: an embedding, layers of seven matrices, small norms."""
    width, hidden, vocabulary = 1024, 2816, 32000
    layer = 4 * width * width + 3 * width * hidden
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocabulary * width) / layer))
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return rng.integers(0, 0x3C00, shape, np.uint16).view(np.float16)  # below 1

    result = {"embed": weights(vocabulary, width), "head": weights(vocabulary, width)}
    for index in range(layers):
        for name in ("q", "k", "v", "o"):
            result[f"layers.{index}.self_attn.{name}_proj.weight"] = weights(width, width)
        for name in ("gate", "up"):
            result[f"layers.{index}.mlp.{name}_proj.weight"] = weights(hidden, width)
        result[f"layers.{index}.mlp.down_proj.weight"] = weights(width, hidden)
        result[f"layers.{index}.norm.weight"] = weights(width)
    return result


def forget(path: Path) -> None:
    """Drop the file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def best_of(ways: list[Way], repeat: int, cold: bool = False) -> dict[str, float]:
    """Run all ways in turn, ``repeat`` times; return the best seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    for _ in range(repeat):
        for name, path, load in ways:
            if cold:
                forget(path)
            started = time.perf_counter()
            result = load(path)
            seconds[name].append(time.perf_counter() - started)
            del result
    return {name: min(values) for name, values in seconds.items()}


def ztensor_copy(path: Path) -> dict[str, np.ndarray]:
    """Owned arrays by the package ztensor."""
    with ztensor.Reader(str(path)) as reader:
        return reader.read_numpy(list(reader.keys()), copy=True)


def ingot_with(workers: int | None, verify: bool = True) -> Callable[[Path], Any]:
    """Owned arrays by Ingot with a number of threads."""

    def load(path: Path) -> dict[str, np.ndarray]:
        with open_checkpoint(path, verify=verify) as checkpoint:
            return load_arrays(checkpoint, workers=workers)

    return load


def load_ways(folder: Path) -> list[Way]:
    """Every way to owned arrays; ``zt`` files with digests that Ingot checks and ztensor does not."""
    plain, zt, theirs = folder / "m.safetensors", folder / "m.zt", folder / "theirs.zt"
    return [
        ("numpy.fromfile (one array)", plain, lambda path: np.fromfile(path, np.uint8)),
        ("safetensors  .safetensors", plain, safetensors.numpy.load_file),
        ("safetensors  .safetensors pread", plain, lambda path: safetensors.numpy.load_file(path, backend="pread")),
        ("ingot        .safetensors", plain, ingot_with(None)),
        ("ingot        .safetensors 1 thread", plain, ingot_with(1)),
        ("ztensor      .zt copy=True", theirs, ztensor_copy),
        ("ingot        .zt without digests", theirs, ingot_with(None)),
        ("ingot        .zt digests checked", zt, ingot_with(None)),
        ("ingot        .zt digests checked, 1 thread", zt, ingot_with(1)),
        ("ingot        .zt digests not checked", zt, ingot_with(None, verify=False)),
        ("ingot        .zt digests not checked, 1 thread", zt, ingot_with(1, verify=False)),
    ]


def decoded(workers: int | None) -> Callable[[Path], Any]:
    """Every tensor decoded into an array of its own, with a number of threads."""

    def load(path: Path) -> dict[str, np.ndarray]:
        with one_thread(workers == 1), open_checkpoint(path) as checkpoint:
            return checkpoint.state_dict()

    return load


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Make ``default_workers`` one for a while."""
    before = os.environ.get("OMP_NUM_THREADS")
    if wanted:
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ["OMP_NUM_THREADS"]
        elif wanted and before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def packed_ways(folder: Path) -> list[Way]:
    """The same INT4 weights in two containers, digests checked, decoded to f16."""
    for suffix in ("zt", "squizd"):
        ingot.convert(folder / "m.safetensors", folder / f"int4.{suffix}", "int4", measure=False)
    return [
        (f"ingot        .{suffix} int4{'' if workers is None else ', 1 thread'}", folder / f"int4.{suffix}", way)
        for workers in (None, 1)
        for way in (decoded(workers),)
        for suffix in ("zt", "squizd")
    ]


def list_ways(folder: Path, count: int) -> list[Way]:
    """Open a file of ``count`` tensors and list their names."""
    small = {f"model.layers.{index}.self_attn.q_proj.weight": np.ones((2, 2), np.float32) for index in range(count)}
    plain, zt = folder / "many.safetensors", folder / "many.zt"
    ingot.numpy.save_file(small, plain, {"format": "pt"})
    ingot.numpy.save_file(small, zt)

    def by_safetensors(path: Path) -> list[str]:
        with safetensors.safe_open(path, "np") as file:
            return list(file.keys())

    def by_ztensor(path: Path) -> list[str]:
        with ztensor.Reader(str(path)) as reader:
            return list(reader.keys())

    def by_ingot(path: Path) -> list[str]:
        with open_checkpoint(path) as checkpoint:
            return list(checkpoint)

    return [
        ("safetensors  .safetensors", plain, by_safetensors),
        ("ingot        .safetensors", plain, by_ingot),
        ("ztensor      .zt", zt, by_ztensor),
        ("ingot        .zt", zt, by_ingot),
    ]


def import_milliseconds(statement: str, repeat: int) -> float:
    """What ``statement`` adds to NumPy's own import, best of ``repeat`` fresh processes."""
    code = f"import numpy, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(repeat)
    ]
    return min(float(run.stdout) for run in runs) * 1000


def report(title: str, seconds: dict[str, float], size: int | None = None) -> None:
    """Print times and ratios to the named peer of the same container."""
    print(f"\n{title}")
    for name, value in seconds.items():
        rate = f"{size / value / 1e9:6.2f} GB/s" if size else f"{value * 1000:6.1f} ms  "
        peer = next((other for other in seconds if name.startswith("ingot") and _peer(other, name)), None)
        ratio = f"{value / seconds[peer]:5.2f} x the time of {peer.split('  ')[0]}" if peer else ""
        if ".squizd" in name:
            ratio = f"{value / seconds[name.replace('.squizd', '.zt')]:5.2f} x the time of .zt"
        print(f"  {name:<46} {value:7.3f} s  {rate}  {ratio}")


def _peer(other: str, name: str) -> bool:
    if ".squizd" in name:
        return False
    container = ".zt" if ".zt" in name else ".safetensors"
    return not other.startswith(("ingot", "numpy")) and container in other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the files; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        arrays = tensors(options.gigabytes)
        size = sum(array.nbytes for array in arrays.values())
        ingot.numpy.save_file(arrays, folder / "m.safetensors")
        ingot.numpy.save_file(arrays, folder / "m.zt")
        ztensor.numpy.save_file(arrays, str(folder / "theirs.zt"))
        del arrays
        figures: dict[str, Any] = {"bytes": size, "threads": default_workers()}
        ways = load_ways(folder)
        figures["warm_s"] = best_of(ways, options.repeat)
        report(f"{size / 1e9:.2f} GB into owned arrays, warm, {default_workers()} threads", figures["warm_s"], size)
        figures["cold_s"] = best_of(ways, max(1, options.repeat // 2), cold=True)
        report("the same, cold", figures["cold_s"], size)
        figures["packed_s"] = best_of(packed_ways(folder), options.repeat)
        report("INT4 in groups of 64, decoded to f16, warm", figures["packed_s"], size)
        figures["list_s"] = best_of(list_ways(folder, options.tensors), options.repeat * 2)
        report(f"open and list {options.tensors} tensors", figures["list_s"])
    statements = ("import ingot", "import ingot.numpy", "import safetensors.numpy", "import ztensor.numpy")
    figures["import_ms"] = {statement: import_milliseconds(statement, options.repeat) for statement in statements}
    print("\non top of import numpy")
    for statement, value in figures["import_ms"].items():
        print(f"  {statement:<46} {value:7.1f} ms")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
