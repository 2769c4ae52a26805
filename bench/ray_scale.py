"""How far conversions by many workers scale: a simulation from costs that are measured here.

    python bench/ray_scale.py --json ray_scale.json

The checkpoint is DeepSeek-V3's by its shapes, 671 B weights in FP8 with a scale per block of 128 x 128, and becomes
INT4 (recipe ``int4``) in one ``.zt``. Measured with the engine itself, in processor seconds: what planning takes per
tensor, reading the plan in a worker, a task's work per tensor and per byte of each kind of source, and what the driver
does per tensor. Simulated: nodes that take tasks as the driver cuts them (``tasks_of``), in order, and the driver that
passes over what was made. Assumed (options): processors and network of a node, and a store's bandwidth, shared evenly.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

import ingot
from ingot.cluster import pool as pools
from ingot.cluster.driver import distribute
from ingot.conversion import planfile
from ingot.conversion import run as convert
from ingot.conversion.options import ConvertOptions

FP8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
CONFIG = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
RECIPE = {"recipe": "int4", "allow_requantize": True}
NODES = (1, 2, 4, 8, 16, 32, 64)
SHARD = 2_000_000_000  # bytes of a file of several
INT4_BYTES = 0.5 + 2 / 32  # per weight: four bits, and a scale of 16 bits for 32 of them


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the kind (``fp8`` or ``bf16``) and shape of each tensor of DeepSeek-V3, without its layer for drafts."""
    yield "bf16", (129280, 7168)
    for layer in range(61):
        yield from (("fp8", shape) for shape in ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)))
        yield from (("bf16", (size,)) for size in (7168, 7168, 1536, 512))
        width, count = (18432, 1) if layer < 3 else (2048, 257)
        if layer >= 3:
            yield from (("bf16", (256, 7168)), ("bf16", (256,)))
        for _ in range(count):
            yield from (("fp8", shape) for shape in ((width, 7168), (width, 7168), (7168, width)))
    yield from (("bf16", (7168,)), ("bf16", (129280, 7168)))


@dataclass(frozen=True)
class Costs:
    """Seconds of one processor. Each ``per_tensor`` and ``per_byte`` of source is a task's."""

    plan: float  # per tensor, once, by the driver
    read_plan: float  # per tensor, once, by each worker
    drive: float  # per tensor, by the driver
    per_tensor: float
    fp8_byte: float
    bf16_byte: float


class Inline:
    """A pool of one worker, this process, that adds up the processor seconds of its tasks and of reading the plan.

    What the driver checks of results is the driver's time, as in a cluster: bytes are not read again there.
    """

    is_local = False
    slots = 1

    def __init__(self) -> None:
        self.opening = self.working = 0.0

    def submit(self, task_type: str, body: Any, check: Callable[[Any], None]) -> Future[Any]:
        future: Future[Any] = Future()
        started = time.process_time()
        planfile.TASKS.opened(body.job)
        opened = time.process_time()
        result = planfile.TASKS.run(body)
        self.opening, self.working = self.opening + opened - started, self.working + time.process_time() - opened
        check(result)
        future.set_result(result)
        return future

    def close(self) -> None:
        planfile.TASKS.close()


def run(folder: Path, count: int, kind: str, shape: tuple[int, int]) -> tuple[float, float, float, float]:
    """Convert so many tensors; return seconds of planning, reading the plan, tasks, and the driver's for the rest."""
    source = folder / f"{kind}-{count}"
    source.mkdir()
    rng, weights = np.random.default_rng(1), dict[str, Any]()
    values = (rng.standard_normal(shape, np.float32) * 8).astype(FP8 if kind == "fp8" else BF16)
    for number in range(count):
        name = f"model.layers.{number // 8}.mlp.experts.{number % 8}.up_proj.weight"
        weights[name] = values
        if kind == "fp8":
            weights[f"{name}_scale_inv"] = np.full([-(-size // 128) for size in shape], 0.01, np.float32)
    ingot.save(source / "model.safetensors", weights)
    (source / "config.json").write_text(json.dumps(CONFIG if kind == "fp8" else {}))
    pool = Inline()
    pools.Processes = lambda: pool  # type: ignore[assignment,misc]
    options = ConvertOptions(source, folder / f"{kind}-{count}.zt", threads=1, **RECIPE)
    started = time.process_time()
    with convert.prepare(options) as prepared:
        planfile.plan_json(prepared, options)
    planned = time.process_time()
    report = ingot.convert(source, options.dst, threads=1, engine="processes", **RECIPE)
    seconds = time.process_time() - planned
    assert len(report.tensors) == count
    rest = seconds - (planned - started) - pool.opening - pool.working
    return planned - started, pool.opening, pool.working, max(rest, 0.0)


def measure(count: int) -> Costs:
    """Measure with ``count`` small tensors, and with a few large ones."""
    with tempfile.TemporaryDirectory() as text:
        folder, large = Path(text), (2048, 7168)
        run(folder, 4, "fp8", (128, 256))  # imports
        plan, opening, working, rest = run(folder, count, "fp8", (128, 128))
        per_tensor = working / count
        by_byte = {}
        for kind, each in (("fp8", 8), ("bf16", 4)):
            nbytes = each * prod(large) * (1 if kind == "fp8" else 2)
            by_byte[kind] = (run(folder, each, kind, large)[2] - each * per_tensor) / nbytes
    return Costs(plan / count, opening / count, rest / count, per_tensor, by_byte["fp8"], by_byte["bf16"])


@dataclass(frozen=True)
class Node:
    """What is assumed of each node, and of the store that all share: processors, bytes per second each way, and those
    at which the store copies files by itself."""

    cores: int
    network: float
    store: float
    copying: float


def _pieces(kind: str, shape: tuple[int, ...], hashed: object) -> tuple[int, int] | None:
    return (shape[0], 1) if kind == "bf16" and len(shape) > 1 else None


FOLDER, SHARDS, ONE_FILE = "folder", "bucket, shards", "bucket, one file"


def simulate(costs: Costs, node: Node, nodes: int, place: str) -> dict[str, Any]:
    """Return what a conversion takes, and what of it is whose. Shards are made by a worker of a whole node each."""
    kinds = [*shapes()]
    sizes = [prod(shape) * (1 if kind == "fp8" else 2) for kind, shape in kinds]
    outs = [prod(shape) * INT4_BYTES if len(shape) > 1 else 2 * prod(shape) for _, shape in kinds]
    work = [costs.per_tensor + n * getattr(costs, f"{kind}_byte") for n, (kind, _) in zip(sizes, kinds, strict=True)]
    each = [
        SimpleNamespace(in_bytes=size, pieces=partial(_pieces, kind, shape))
        for size, (kind, shape) in zip(sizes, kinds, strict=True)
    ]
    plan: Any = SimpleNamespace(steps=each, in_bytes=sum(sizes))
    threads = node.cores if place == SHARDS else 1
    slots = nodes * node.cores // threads
    rate = min(node.network / node.cores * threads, node.store / slots)  # of one worker
    planned, opening = costs.plan * len(kinds), costs.read_plan * len(kinds)
    files = [str(end // SHARD) for end in accumulate(outs)]
    if place == SHARDS:
        tasks = distribute.tasks_by_file(plan, set(), files)
    else:
        tasks = distribute.tasks_of(plan, set(), slots, [()] * len(kinds))
    free, done, through = [planned + opening] * slots, [0.0] * len(kinds), [place == ONE_FILE] * len(kinds)
    for task in tasks:
        steps = range(task.start, task.stop)
        read, made, seconds = (sum(each[number] for number in steps) for each in (sizes, outs, work))
        share = task.nbytes / read  # less than 1 of a piece
        put = made / rate if place == SHARDS else 0  # when it is whole
        ended = heapq.heappop(free) + max(share * seconds / threads, share * max(read, made) / rate) + put
        heapq.heappush(free, ended)
        for number in steps:
            done[number] = max(done[number], ended)
            through[number] |= task.rows is not None
    clock = planned
    for number, out in enumerate(outs):  # the driver passes over all in order
        clock = max(clock, done[number]) + costs.drive + (out / node.network if through[number] else 0)
    bandwidth = {FOLDER: float("inf"), SHARDS: node.copying, ONE_FILE: node.network}[place]
    published = sum(outs) / bandwidth
    return {
        "nodes": nodes,
        "seconds": clock + published,
        "planning": planned,
        "reading": opening,
        "encoding": sum(work) / (nodes * node.cores),
        "moving": max(sum(sizes), sum(outs)) / (rate * slots),
        "driving": costs.drive * len(kinds) + (sum(outs) / node.network if place == ONE_FILE else 0) + published,
    }


def main() -> None:
    """Measure, simulate, print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2000, help="small tensors that are measured with")
    parser.add_argument("--cores", type=int, default=16, help="processors of a node")
    parser.add_argument("--network", type=float, default=3.1e9, help="bytes per second of a node, each way")
    parser.add_argument("--store", type=float, default=50e9, help="bytes per second of the store for all nodes")
    parser.add_argument("--copying", type=float, default=8e9, help="bytes per second that the store copies by itself")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    costs, node = measure(args.tensors), Node(args.cores, args.network, args.store, args.copying)
    print({name: f"{value:.3g}" for name, value in asdict(costs).items()})
    places = (FOLDER, SHARDS, ONE_FILE)
    rows = [[simulate(costs, node, nodes, place) for place in places] for nodes in NODES]
    print("\nSeconds, and how many times as fast as one node:\n")
    print(f"| nodes | {' | '.join(places)} | encoding | moving |\n|{' ---: |' * (len(places) + 3)}")
    for row in rows:
        whole = [
            f"{one['seconds']:,.0f} ({first['seconds'] / one['seconds']:.1f})"
            for first, one in zip(rows[0], row, strict=True)
        ]
        print(f"| {row[0]['nodes']} | {' | '.join(whole)} | {row[0]['encoding']:,.0f} | {row[0]['moving']:,.0f} |")
    print("\nPlanning, reading the plan, the driver:")
    for place, one in zip(places, rows[-1], strict=True):
        print(f"{place}: {one['planning']:.0f}, {one['reading']:.1f}, {one['driving']:.0f} s")
    if args.json is not None:
        tables = {place: [row[index] for row in rows] for index, place in enumerate(places)}
        args.json.write_text(json.dumps({"costs": asdict(costs), "node": asdict(node), "tables": tables}, indent=1))


if __name__ == "__main__":
    main()
