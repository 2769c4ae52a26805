"""Kill every writer at random moments: ``make kills``, or ``python -m tests.damage.kills --kills N [NAME ...]``.

A child process converts, diffs or patches and is killed by SIGKILL after a random time, every second time in a run that
resumes what another kill left. After each kill the destination is absent, or it has just the bytes of a run that nobody
stopped; then a run with ``resume`` has to make those bytes. Any difference is printed and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np

import ingot
from tests.support import coreml, model_folder

LAYERS, HIDDEN = 4, 256


@dataclass(frozen=True)
class Writer:
    """An operation that writes: its name, the destination's file name, and what writes it."""

    name: str
    file: str
    write: Callable[[Path, bool], object]


def writers(folder: Path) -> list[Writer]:
    """Return all writers; their sources lie in ``folder``."""
    random = np.random.default_rng(0)
    base = {
        f"model.layers.{layer}.mlp.{part}_proj.weight": random.standard_normal((HIDDEN * 4, HIDDEN)).astype(np.float32)
        for layer in range(LAYERS)
        for part in ("up", "gate")
    }
    tuned = {name: value + np.float32(1e-3) * (random.random(value.shape) < 0.05) for name, value in base.items()}
    start, end, model = folder / "base.safetensors", folder / "tuned.safetensors", folder / "model"
    ingot.save(start, base)
    ingot.save(end, {name: value.astype(np.float32) for name, value in tuned.items()})
    model_folder.write(model)
    packed, delta = folder / "packed.zt", folder / "delta.zt"
    ingot.convert(start, packed, "int4")
    ingot.diff(start, end, delta)
    package = folder / "program.mlpackage"
    for path, data in coreml.sample().files().items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(data)

    def converts(name: str, file: str, source: Path, recipe: str | None = None, **options: object) -> Writer:
        def write(out: Path, resume: bool) -> object:
            return ingot.convert(source, out, recipe, resume=resume, threads=1, **options)

        return Writer(name, file, write)

    def diffs(name: str, file: str, strategy: str) -> Writer:
        return Writer(name, file, lambda out, resume: ingot.diff(start, end, out, strategy, resume=resume, threads=1))

    return [
        converts("zt", "x.zt", start, "int4"),
        converts("zt2", "x.zt", packed, None, format="zt2"),
        converts("safetensors", "x", start, "bf16", format="safetensors", max_shard="1MiB"),
        converts("squizd", "x.squizd", start, "int4"),
        converts("npydir", "x", start, "int8", format="npydir"),
        converts("gguf", "x.gguf", start, "q4_0", keep_names=True),
        converts("gguf of a model", "m.gguf", model, "q8_0"),
        converts("gptq", "x", packed, None, format="gptq"),
        converts("awq", "x", packed, None, format="awq"),
        converts("compressed-tensors", "x", packed, None, format="compressed-tensors"),
        converts("mlx", "x", packed, None, format="mlx", keep_names=True),
        converts("modelopt", "x", packed, None, format="modelopt"),
        converts("coreml", "x.mlpackage", package),
        diffs("delta", "d.zt", "int4"),
        diffs("wdelta", "d.wdelta", "sparse"),
        Writer("patch", "p.safetensors", lambda out, resume: ingot.patch(start, delta, out, resume=resume, threads=1)),
    ]


def run(writer: Writer, out: Path, resume: bool) -> int:
    """Start a child that writes; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            writer.write(out, resume)
        except BaseException as error:
            print(f"{writer.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def digest(path: Path) -> str:
    """Return a digest of a file or of a folder's names and files."""
    found = sha256()
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        found.update(str(each.relative_to(path.parent)).encode())
        found.update(each.read_bytes() if each.is_file() else b"")
    return found.hexdigest()


def remove(path: Path) -> None:
    """Remove a file, a folder, or nothing."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def check(writer: Writer, kills: int, folder: Path) -> int:
    """Kill a writer ``kills`` times; print and return the number of wrong outcomes."""
    folder.mkdir()
    out, random = folder / writer.file, Random(writer.name)
    start = time.monotonic()
    if os.waitstatus_to_exitcode(os.waitpid(run(writer, out, False), 0)[1]):
        print(f"{writer.name}: does not write", flush=True)
        return 1
    took, wanted = time.monotonic() - start, digest(out)
    remove(out)
    wrong = stopped = 0
    while stopped < kills:
        child = run(writer, out, resume=stopped % 2 == 1)
        time.sleep(random.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        stopped += os.WIFSIGNALED(status)
        wrong += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        if out.exists():
            wrong += digest(out) != wanted
        elif stopped % 4 == 0:
            code = os.waitstatus_to_exitcode(os.waitpid(run(writer, out, resume=True), 0)[1])
            wrong += code != 0 or digest(out) != wanted
        remove(out)
    print(f"{writer.name}: {stopped} kills within {took:.2f} s, {wrong} wrong", flush=True)
    return wrong


def main() -> int:
    """Parse the arguments and kill each writer; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="for each writer (default 300)")
    parser.add_argument("names", nargs="*", help="writers; all by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = [item for item in writers(folder) if not options.names or item.name in options.names]
        wrong = sum(check(item, options.kills, folder / f"run {number}") for number, item in enumerate(found))
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
