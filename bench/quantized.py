"""Lossless compression of quantized models: recipe ``lossless`` beside lmzip and zstd -19, in the same run.

    pip install lmzip zstandard
    python bench/quantized.py model-q4_k.gguf other.gguf --lmz ~/.venv/bin/lmz

For every GGUF it prints what each program takes off the file, and off its tensors: for lmzip and zstd the header,
compressed by zstd -19, is subtracted. Ingot's archive is converted back and compared with the file. The rates are those
of the encoding ``ingot.packed/1`` on one thread, in bytes of blocks per second of CPU time. The best of several runs
counts, because other programs may run at the same time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

import ingot
from ingot.core.bytes import packed
from ingot.model.layouts.records import record_layout
from ingot.model.tensor import Tensor

_SAMPLE = 64 << 20
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--lmz", help="the program lmz of the package lmzip")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for path in arguments.models for row in measure(path, arguments.lmz, arguments.repeat)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def measure(path: Path, lmz: str | None, repeat: int) -> list[Row]:
    """Print and return the figures of one GGUF."""
    data = path.read_bytes()
    with ingot.open(path) as model:
        blocks = [tensor for tensor in model.values() if tensor.codec == "ggml_blocks"]
        tensor_bytes = sum(part.length for tensor in model.values() for part in tensor.parts.values())
        rates = rates_of(blocks, repeat)
    compressor = zstandard.ZstdCompressor(level=19)
    header = len(data) - tensor_bytes
    header_size = len(compressor.compress(data[:header]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = folder / "model.zt"
        ingot.convert(path, archive, recipe="lossless")
        ingot.convert(archive, folder / path.name)
        if (folder / path.name).read_bytes() != data:
            raise SystemExit(f"expected the bytes of {path} back")
        with ingot.open(archive) as stored:
            coded = sum(part.length for tensor in stored.values() for part in tensor.parts.values())
        rows = [row(path, "ingot lossless", archive.stat().st_size, coded, len(data), tensor_bytes, rates)]
        size = len(compressor.compress(data))
        rows.append(row(path, "zstd -19", size, size - header_size, len(data), tensor_bytes))
        if lmz:
            subprocess.run([lmz, "compress", "-q", "-j", "1", path, folder / "model.lmz"], check=True)
            size = (folder / "model.lmz").stat().st_size
            rows.append(row(path, "lmzip", size, size - header_size, len(data), tensor_bytes))
    for item in rows:
        print("  ".join(f"{key} {value}" for key, value in item.items()), flush=True)
    return rows


def row(
    path: Path, name: str, size: int, coded: int, full: int, tensors: int, rates: tuple[float, float] | None = None
) -> Row:
    """Return what a program takes off a file and off its tensors, in percent."""
    result: Row = {
        "model": path.stem,
        "program": name,
        "off_file": round(100 * (1 - size / full), 2),
        "off_tensors": round(100 * (1 - coded / tensors), 2),
    }
    return result | ({} if rates is None else {"encode": round(rates[0], 2), "decode": round(rates[1], 2)})


def rates_of(tensors: list[Tensor], repeat: int) -> tuple[float, float]:
    """Return GB/s of encoding and of decoding frames of the largest tensors."""
    seconds = [0.0, 0.0]
    size = 0
    for tensor in sorted(tensors, key=lambda item: -item.nbytes):
        spec = tensor.spec()
        layout = record_layout(spec, spec.parts[0])
        data = tensor.parts["blocks"].view()
        step = packed.content_of(layout)
        for start in range(0, len(data), step):
            content = bytes(data[start : start + step])
            frame = packed.encode_frame(layout, content)
            out = np.empty(len(content), np.uint8)
            seconds[0] += best(partial(packed.encode_frame, layout, content), repeat)
            seconds[1] += best(partial(packed.decode_frame, layout, frame, out, "frame"), repeat)
            size += len(content)
            if size > _SAMPLE:
                break
    return size / seconds[0] / 1e9, size / seconds[1] / 1e9


def best(call: Callable[[], object], repeat: int) -> float:
    """Return the least CPU time of a call."""
    times = []
    for _ in range(repeat):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
