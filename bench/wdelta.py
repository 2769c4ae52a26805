"""Making and applying ``.wdelta`` files beside the package deltatensors: the same pair, job and processors, in one run.

    python bench/wdelta.py --megabytes 512 --json wdelta.json

Section ``codec``: the numbers alone, from base and fine-tune to a delta's arrays, and from these and the base to the
fine-tune. Section ``memory``: state dicts in memory, a delta as a file between them (the peer's ``save_delta`` and
``load_delta``, ours ``ingot.diff`` and ``ingot.apply_delta``). Section ``files``: from folders to a delta
(``save_delta_from_paths``), and from a folder and a delta to the fine-tune: the peer ends with arrays in f32 in memory,
Ingot with files. Ratios are to that; row "saved" has the peer's time with files of safetensors at the end too.

The pair: matrices of 2^24 and of more elements, two shards, page cache warm; the fine-tune is the base with noise of a
hundredth of its spread. Every way runs in a process of its own on ``--processors``; the best time and the best
processor time of ``--repeat`` count. What each side made, the other reads, to the same values.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from patch import index_shards

import ingot
from ingot.core.numeric.dtypes import cast, numpy_dtype

STRATEGIES = ("int4", "sparse", "quantized")
SHAPES = ((4096, 4096), (4096, 4096), (11008, 4096), (4096, 4096))
Row = dict[str, Any]

# Runs `work` several times, each after `before`, and prints the best seconds and processor seconds.
CHILD = """
import json, os, sys, time
base, tuned, delta, out, strategy, repeat, cpus = sys.argv[1:8]
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(cpus)])
import numpy as np, ingot, deltatensors as peer, torch, safetensors.torch
from deltatensors.compress import compress, decompress
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.table import CODECS
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
torch.set_num_threads(int(cpus))
codec = delta_codec({{"int4": "delta_int4", "sparse": "delta_sparse", "quantized": "delta_sign"}}[strategy])
def state(path):
    return {{name: tensor.numpy().copy() for name, tensor in ingot.open(path).items()}}
def encode(old, new, kind):
    encoder = codec.encoder(old.shape, kind, {{}})
    step = encoder.step if not encoder.single_chunk else old.size
    some = old.size > 1 << 24 or codec.id == "delta_sign"
    rows = max(1, max(step, (1 << 20) // step * step) // old.shape[1]) if some else len(old)
    cuts = [slice(start, start + rows) for start in range(0, len(old), rows)]
    for _ in range(encoder.fit_passes):
        for cut in cuts: encoder.fit_pass(old[cut], new[cut])
    made = [encoder.encode(old[cut], new[cut], cut.start) for cut in cuts]
    if len(made) > 1:
        made = [{{role: np.concatenate([part[role] for part in made]) for role in made[0]}}]
    stored = {{part.role: memory_part(made[0][part.role], part.dtype) for part in encoder.parts}}
    return Tensor("t", old.shape, "f32", codec.id, stored, dict(encoder.params), CODECS[codec.id])
def apply(tensor, old, kind, new=None):
    new = np.empty_like(old) if new is None else new
    applier = codec.applier(tensor, kind)
    applier.apply(old, new)
    applier.finish()
    return new
{prepare}
best = [float("inf")] * 2
for _ in range(int(repeat)):
    {before}
    clocks = time.perf_counter(), time.process_time()
    {work}
    best = [min(*both) for both in zip(best, (time.perf_counter() - clocks[0], time.process_time() - clocks[1]))]
print("FIGURES", json.dumps(best))
"""
LOADED = "old, new = state(base), state(tuned)"
KIND = LOADED + "\nkind = ingot.open(base)[next(iter(old))].dtype"


@dataclass(frozen=True)
class Way:
    """One side's way of a job: what is timed, what is done once before, and what before every time."""

    section: str
    job: str
    name: str
    work: str
    prepare: str = ""
    before: str = "pass"
    against: bool = True

    @property
    def peer(self) -> bool:
        return self.name.startswith("deltatensors")


WAYS = (
    Way(
        "codec",
        "make",
        "deltatensors",
        "made = [compress(new[n].astype(np.float32) - old[n].astype(np.float32), strategy) for n in old]",
        LOADED,
        "made = None",
    ),
    Way("codec", "make", "ingot", "made = [encode(old[n], new[n], kind) for n in old]", KIND, "made = None"),
    Way(
        "codec",
        "apply",
        "deltatensors",
        "result = [old[n].astype(np.float32) + decompress(made[n]) for n in old]",
        LOADED + "\nmade = {n: compress(new[n].astype(np.float32) - old[n].astype(np.float32), strategy) for n in old}",
        "result = None",
    ),
    Way(
        "codec",
        "apply",
        "ingot",
        "result = [apply(made[n], old[n], kind) for n in old]",
        KIND + "\nmade = {n: encode(old[n], new[n], kind) for n in old}",
        "result = None",
    ),
    Way(
        "codec",
        "apply",
        "ingot, in place",
        "for n in old: apply(made[n], mine[n], kind, mine[n])",
        KIND + "\nmade = {n: encode(old[n], new[n], kind) for n in old}",
        "mine = {n: old[n].copy() for n in old}",
    ),
    Way("memory", "make", "deltatensors", "peer.save_delta(delta, new, old, strategy)", LOADED),
    Way("memory", "make", "ingot", "ingot.diff(old, new, delta, strategy, overwrite=True)", LOADED),
    Way(
        "memory",
        "make",
        "ingot, errors not measured",
        "ingot.diff(old, new, delta, strategy, overwrite=True, measure=False)",
        LOADED,
    ),
    Way("memory", "apply", "deltatensors", "result = peer.load_delta(delta, old)", LOADED, "result = None"),
    Way("memory", "apply", "ingot", "ingot.apply_delta(mine, delta)", LOADED, "mine = {n: old[n].copy() for n in old}"),
    Way(
        "memory",
        "apply",
        "ingot, no undo",
        "ingot.apply_delta(mine, delta, undo=False)",
        LOADED,
        "mine = {n: old[n].copy() for n in old}",
    ),
    Way("files", "make", "deltatensors", "peer.save_delta_from_paths(delta, tuned, base, strategy=strategy)"),
    Way("files", "make", "ingot", "ingot.diff(base, tuned, delta, strategy, overwrite=True)"),
    Way(
        "files",
        "make",
        "ingot, errors not measured",
        "ingot.diff(base, tuned, delta, strategy, overwrite=True, measure=False)",
    ),
    Way(
        "files",
        "apply",
        "deltatensors",
        "result = peer.load_delta_from_paths(delta, base)",
        before="result = None",
    ),
    Way(
        "files",
        "apply",
        "deltatensors, saved",
        "safetensors.torch.save_file({n: torch.from_numpy(v) for n, v in"
        " peer.load_delta_from_paths(delta, base).items()}, out + '.safetensors')",
        against=False,
    ),
    Way("files", "apply", "ingot", "ingot.patch(base, delta, out, overwrite=True)"),
)


def make_pair(folder: Path, megabytes: int, dtype: str) -> tuple[Path, Path]:
    """Write base and fine-tune of about so many megabytes each, two shards."""
    rng, left = np.random.default_rng(0), megabytes << 20
    names: list[dict[str, np.ndarray]] = [{}, {}, {}, {}]
    for index in range(1 << 20):
        shape = SHAPES[index % len(SHAPES)]
        weights = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        noise = rng.standard_normal(shape, np.float32) * np.float32(0.0002)
        for side, values in enumerate((weights, weights + noise)):
            names[2 * side + index % 2][f"model.layers.{index}.weight"] = cast(values, dtype)
        left -= weights.size * numpy_dtype(dtype).itemsize
        if left <= 0 and index:
            break
    base, tuned = folder / "base", folder / "tuned"
    for side, path in enumerate((base, tuned)):
        path.mkdir()
        for shard in range(2):
            ingot.save(path / f"model-{shard + 1:05}-of-00002.safetensors", names[2 * side + shard])
        index_shards(path)
    return base, tuned


def run(way: Way, folder: Path, strategy: str, options: argparse.Namespace) -> Row:
    """Time one way in a fresh process."""
    delta = delta_of(way, folder, strategy)
    paths = [folder / "base", folder / "tuned", delta, folder / "out"]
    code = CHILD.format(prepare=way.prepare, before=way.before, work=way.work)
    command = [sys.executable, "-c", code, *map(str, paths), strategy, str(options.repeat), str(options.processors)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(options.processors))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **threads})
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES"))
    seconds, processor = json.loads(line.removeprefix("FIGURES"))
    told = {"section": way.section, "job": way.job, "name": way.name, "strategy": strategy}
    return {**told, "seconds": round(seconds, 3), "processor": round(processor, 3)}


def delta_of(way: Way, folder: Path, strategy: str) -> Path:
    section = "files" if way.section == "codec" else way.section
    return folder / f"{'peer' if way.peer else 'ours'}-{section}-{strategy}.wdelta"


def compare(folder: Path, strategy: str, dtype: str, options: argparse.Namespace) -> list[Row]:
    """Run every way of a strategy; print ratios to the peer's times."""
    rows: list[Row] = []
    theirs: dict[tuple[str, str], Row] = {}
    for way in WAYS:
        if way.section not in options.section:
            continue
        if way.job == "apply" and way.section != "codec" and not delta_of(way, folder, strategy).exists():
            raise SystemExit(f"no delta to apply for {way}")
        row = {"dtype": dtype, **run(way, folder, strategy, options)}
        key = (way.section, way.job)
        if way.peer and way.against:
            theirs[key] = row
        elif not way.peer:
            row["ratio"] = round(theirs[key]["seconds"] / row["seconds"], 1)
            row["processor_ratio"] = round(theirs[key]["processor"] / row["processor"], 1)
        rows.append(row)
        print(text(row), flush=True)
    return rows


def agree(folder: Path, strategy: str, dtype: str, sections: list[str]) -> None:
    """Exit unless each side makes the same values of each delta."""
    import deltatensors as peer

    base = folder / "base"
    for path in [folder / f"{who}-{section}-{strategy}.wdelta" for who in ("ours", "peer") for section in sections]:
        if not path.exists():
            continue
        state = {name: tensor.numpy() for name, tensor in ingot.open(base).items()}
        theirs = peer.load_delta(path, state, verify=False)
        ingot.patch(base, path, folder / "out", overwrite=True)
        for name, tensor in ingot.open(folder / "out").items():
            want = cast(theirs.pop(name), tensor.dtype)
            if want.tobytes() != tensor.numpy().tobytes():
                raise SystemExit(f"{path.name}: {name} is not what deltatensors makes of it")


def text(row: Row) -> str:
    what = f"{row['dtype']:5}{row['strategy']:10} {row['section']:7}{row['job']:6} {row['name']:27}"
    faster = f"{row['ratio']:6.1f} x{row['processor_ratio']:7.1f} x" if "ratio" in row else ""
    return f"  {what}{row['seconds']:8.3f} s{row['processor']:8.3f} s{faster}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = list(dict.fromkeys(way.section for way in WAYS))
    parser.add_argument("--megabytes", type=int, default=512, help="of each of the two (default %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), action="append", help="default: bf16 and f32")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="only these (default: all)")
    parser.add_argument("--section", choices=sections, action="append", help="only these (default: all)")
    parser.add_argument("--processors", type=int, default=os.cpu_count() or 1, help="for both sides (default: all)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to make the files; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.section = options.section or sections
    rows: list[Row] = []
    print(f"{options.processors} processors, best of {options.repeat}: seconds, processor seconds, ratios of both")
    for dtype in options.dtype or ("bf16", "f32"):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            make_pair(Path(name), options.megabytes, dtype)
            for strategy in options.strategy or STRATEGIES:
                rows += compare(Path(name), strategy, dtype, options)
                agree(Path(name), strategy, dtype, options.section)
    if options.json:
        told = {"megabytes": options.megabytes, "processors": options.processors}
        options.json.write_text(json.dumps({**told, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
