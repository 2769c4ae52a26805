"""What comes before the first weight: opening and listing files of many tensors, imports, and short commands.

    python bench/opening.py --tensors 10000 --json opening.json

Processor time, the median of several runs in turn: it counts little of what else the machine does. Files are opened
beside ``safetensors`` in one process; imports and commands run in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

import ingot

FILES = {
    "safetensors .safetensors": "many.safetensors",
    "ingot .safetensors": "many.safetensors",
    "ingot .zt": "many.zt",
    "ingot .zt, container 2": "two.zt",
    "ingot .gguf": "many.gguf",
    "ingot .squizd": "many.squizd",
    "ingot .squizd, a layer each": "layers.squizd",
    "ingot .wdelta, sparse": "sparse.wdelta",
    "ingot .wdelta, int4": "int4.wdelta",
}


def make(folder: Path, count: int) -> None:
    """Write the same small matrices, under the names of a model of experts, in every container with one header."""
    names = [f"model.layers.{index // 64}.mlp.experts.{index % 64}.w{index}.weight" for index in range(count)]
    source, tuned = folder / "many.safetensors", folder / "tuned.safetensors"
    save_file({name: np.ones((8, 8), np.float32) for name in names}, source)
    save_file({name: np.linspace(0.9, 1.1, 64, dtype=np.float32).reshape(8, 8) for name in names}, tuned)
    for kind in ("zt", "gguf", "squizd"):
        ingot.convert(source, folder / f"many.{kind}", measure=False, keep_names=True)
    ingot.convert(source, folder / "two.zt", container="2", measure=False)
    layers = {f"model.layers.{index}.mlp.w.weight": np.ones((8, 8), np.float32) for index in range(count)}
    ingot.save(folder / "layers.squizd", layers)
    for strategy in ("sparse", "int4"):
        ingot.diff(source, tuned, folder / f"{strategy}.wdelta", strategy=strategy, measure=False)


def listed_by_peer(path: Path) -> list[str]:
    with safetensors.safe_open(path, "np") as file:
        return list(file.keys())


def listed(path: Path) -> list[str]:
    with ingot.open(path) as checkpoint:
        return list(checkpoint)


def medians(functions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Run all functions in turn; return the median processor time of each.

    Each is run right after ``safetensors``, so that both find the machine in the same state.
    """
    (peer, first), *others = functions.items()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in others:
            for run, call in ((peer, first), (name, function)):
                started = time.process_time()
                call()
                seconds[run].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def of_child(command: Sequence[str]) -> float:
    """Return the processor time of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(folder: Path) -> dict[str, list[str]]:
    """Return what is run by itself; ``four.safetensors`` gets 400 tensors."""
    path = folder / "four.safetensors"
    save_file(
        {f"model.layers.{index // 10}.w{index}.weight": np.ones((16, 16), np.float16) for index in range(400)}, path
    )
    python = sys.executable
    program = [python, "-c", "from ingot.cli.entry import main; main()"]
    return {
        "import numpy": [python, "-c", "import numpy"],
        "import numpy, ingot": [python, "-c", "import numpy, ingot"],
        "import numpy, and open a file": [python, "-c", f"import numpy, ingot; ingot.open({str(path)!r})"],
        "ingot --version": [*program, "--version"],
        "ingot inspect, 400 tensors": [*program, "inspect", str(path)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, asked.tensors)
        ways: dict[str, Callable[[], object]] = {
            row: partial(listed if row.startswith("ingot") else listed_by_peer, folder / file)
            for row, file in FILES.items()
        }
        opened = medians(ways, asked.repeat)
        started = {
            row: min(of_child(command) for _ in range(asked.repeat)) for row, command in commands(folder).items()
        }
    peer = opened[next(iter(FILES))]
    print(f"open and list {asked.tensors} tensors, ms of processor time")
    for row, seconds in opened.items():
        print(f"  {row:32}{1000 * seconds:8.1f}  {seconds / peer:5.2f} x safetensors")
    print("processes, ms of processor time")
    for row, seconds in started.items():
        print(f"  {row:32}{1000 * seconds:8.1f}  {seconds / started['import numpy']:5.2f} x import numpy")
    if asked.json:
        figures: dict[str, Any] = {"tensors": asked.tensors, "opened_s": opened, "started_s": started}
        asked.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
