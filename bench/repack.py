"""Move the same INT4 weights from every family's container into every other one, without decoding them.

    python bench/repack.py --megabytes 256 --max-ram 256MiB --json repack.json

The sources are made of seeded Gaussian weights in a temporary folder. Figures are bytes of the source's files per
second of processor time, of all threads together, user and system: what one thread of a machine that has nothing else
to do gets through, from files in the page cache into files. A plain copy of the same bytes is measured in turn with
every pair: behind each figure stands how many times as long it takes, and which share of it are reading, writing and
digests. Removing what was written before is not measured. First a line with memcpy and the digest of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from clock import turns

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import cast
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor

ROWS, COLS = 4096, 4096
NAME = "model.layers.{}.mlp.down_proj.weight"
FAMILIES = {"zt": ".zt", "gguf": ".gguf", "mlx": "", "gptq": "", "awq": "", "compressed-tensors": ""}


def weights(group: int) -> Tensor:
    """Return a matrix of symmetric INT4 with scales in f16, which every family has."""
    values = cast(np.random.default_rng(0).standard_normal((ROWS, COLS), np.float32) * np.float32(0.05), "f16")
    return encode_tensor(AffineCodec(), values, {"bits": 4, "group": group, "scales": "f16"}, dtype="f16")


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def pair(source: Path, target: Path, family: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Convert once without and ``repeat`` times with a clock."""
    reports = []

    def way() -> None:
        reports.append(
            ingot.convert(source, target, format=family, threads=arguments.threads, max_ram=arguments.max_ram)
        )

    plain = target.with_name("copy")
    way()
    took = copy = float("inf")
    for _ in range(arguments.repeat):
        remove(target)
        took = min(took, clocked(way))
        copy = min(copy, clocked(lambda: copied(source, plain)))
        remove(plain)
    remove(target)
    start = time.process_time()
    with moving() as moved:
        way()
    share = moved[0] / (time.process_time() - start)
    remove(target)
    rates = {"rate": size(source) / took / 1e9, "copy": size(source) / copy / 1e9, "moving": share}
    return {**rates, "actions": dict(reports[-1].actions), "exact": reports[-1].exact}


def clocked(way: Callable[[], object]) -> float:
    """Return the processor time that a call takes, in seconds."""
    start = time.process_time()
    way()
    return time.process_time() - start


def copied(source: Path, target: Path) -> None:
    """Copy a file or folder as ``cp`` does."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def machine() -> str:
    """Return what this machine does to memory alone: a copy, and the digest that ``.zt`` has."""
    source, target = np.ones(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
    copy, digest = turns(
        5,
        lambda: np.copyto(target, source),
        lambda: checksums.digest("crc32c", memoryview(source)),
        clock=time.process_time,
    )
    return f"memcpy {source.nbytes / copy / 1e9:.1f} GB/s, CRC-32C {source.nbytes / digest / 1e9:.1f} GB/s"


@contextmanager
def moving() -> Iterator[list[float]]:
    """Add up the processor time that reading, writing and digests take while this block runs."""
    total = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments)
            finally:
                total[0] += time.thread_time() - start

        return run

    places: list[tuple[Any, str]] = [(os, "preadv"), (os, "pwrite"), (checksums.Crc32c, "update")]
    before = [getattr(*place) for place in places]
    for (where, name), function in zip(places, before, strict=True):
        setattr(where, name, timed(function))
    try:
        yield total
    finally:
        for (where, name), function in zip(places, before, strict=True):
            setattr(where, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--max-ram", default="256MiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--group", type=int, default=32, help="weights per scale (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--sources", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--targets", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to make the files (default: the system's temporary folder)")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, tensor = Path(name), weights(arguments.group)
        count = max(1, arguments.megabytes * 10**6 // tensor.nbytes)
        ingot.save(folder / "base.zt", {NAME.format(index): tensor for index in range(count)})
        megabytes = size(folder / "base.zt") / 1e6
        print(f"GB/s of processor time, {megabytes:.0f} MB, groups of {arguments.group}, under {arguments.max_ram};")
        print(f"how many times as long as a plain copy; share of reading, writing and digests; {machine()}")
        print(f"{'from':20}" + "".join(f"{target:>22}" for target in arguments.targets))
        for family in arguments.sources:
            source = folder / f"source{FAMILIES[family]}"
            ingot.convert(folder / "base.zt", source, format=family)
            rows[family] = {
                target: pair(source, folder / f"target{FAMILIES[target]}", target, arguments)
                for target in arguments.targets
            }
            remove(source)
            print(f"{family:20}" + "".join(f"{shown(rows[family][target]):>22}" for target in arguments.targets))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2))


def shown(found: dict[str, Any]) -> str:
    """A rate, what stands beside it, and what is not a repack."""
    note = "" if set(found["actions"]) == {"repacked"} else " " + "/".join(found["actions"])
    ratio = found["copy"] / found["rate"]
    return f"{found['rate']:.2f} {ratio:.1f}x {found['moving']:.0%}{note}{'' if found['exact'] else ' !'}"


if __name__ == "__main__":
    main()
