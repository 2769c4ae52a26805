"""Bytes that a base and ten fine-tunes of it take: whole files, zstd, chunks cut by content as Xet does, and a library.

    python bench/store.py --model FOLDER --json store.json

The base is the model that ships with Ingot, or a folder with bf16 weights. In four fine-tunes 2 % of the values moved
by a step or two, as reinforcement learning does; in three every value moved a little (noise of 1 % of a matrix's RMS);
three have a LoRA of rank 8 merged into each matrix (of 5 %). Whole files are kept once per content, as the cache of
huggingface_hub does. Chunks are of 8 to 128 KiB, 64 KiB on average (fastcdc), each kept once: as they are, and in zstd
with the bytes of a value apart where that is smaller, which Xet does with LZ4. The library is proven: every file is got
back and compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard
from fastcdc import fastcdc

import ingot

Row = dict[str, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = (("2 % of values moved", 4), ("every value moved", 3), ("LoRA merged", 3))
SHIPPED = Path(__file__).resolve().parents[1] / "src" / "ingot" / "demo" / "data"
RANK, NOISE, LORA = 8, 0.01, 0.05
LEAST, AVERAGE, MOST = 8 << 10, 64 << 10, 128 << 10


def tuned(tensors: dict[str, Any], kind: str, seed: int) -> dict[str, Any]:
    """Return a fine-tune of the base."""
    rng = np.random.default_rng(seed)
    return {name: _moved(values, kind, rng) if values.dtype == BF16 else values for name, values in tensors.items()}


def _moved(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind.startswith("2 %"):
        bits = values.view(np.uint16)
        moves = (rng.random(bits.shape) < 0.02) & (bits & 0x7FFF > 2)  # zeros stay
        steps = rng.choice(np.array([-2, -1, 1, 2], np.int16), bits.shape) * moves
        return (bits + steps.view(np.uint16)).view(BF16)
    wide = values.astype(np.float32)
    scale = np.sqrt(np.mean(wide**2)) if wide.size else 0.0
    if kind.startswith("every"):
        return (wide + NOISE * scale * rng.standard_normal(wide.shape, np.float32)).astype(BF16)
    if wide.ndim != 2:
        return values
    down, up = (rng.standard_normal(shape, np.float32) for shape in ((wide.shape[0], RANK), (RANK, wide.shape[1])))
    return (wide + LORA * scale / np.sqrt(RANK) * (down @ up)).astype(BF16)


class Whole:
    """Files by their digest; each is stored as ``stored`` says."""

    name = "whole files"

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def add(self, folder: Path) -> int:
        """Take a model's files in; return the bytes by which the store grew."""
        return sum(self._stored(piece) for path in sorted(folder.iterdir()) for piece in self._new(path.read_bytes()))

    def _new(self, data: bytes) -> Iterator[bytes]:
        for piece in self._pieces(data):
            digest = blake2b(piece, digest_size=32).digest()
            if digest not in self._known:
                self._known.add(digest)
                yield piece

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        yield data

    def _stored(self, piece: bytes) -> int:
        return len(piece)


class Zstd(Whole):
    """Whole files in zstd."""

    name = "zstd -3"

    def _stored(self, piece: bytes) -> int:
        return len(zstandard.ZstdCompressor(level=3).compress(piece))


class Chunks(Whole):
    """Chunks cut by content."""

    name = "chunks (fastcdc)"

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        for chunk in fastcdc(data, min_size=LEAST, avg_size=AVERAGE, max_size=MOST, fat=True):
            yield bytes(chunk.data)


class PackedChunks(Chunks):
    """Chunks, each in zstd, with the bytes of bf16 values apart where that is smaller."""

    name = "chunks, bytes apart, zstd"

    def _stored(self, piece: bytes) -> int:
        apart = (
            np.frombuffer(piece[: len(piece) // 2 * 2], np.uint8).reshape(-1, 2).T.tobytes()
            + piece[len(piece) // 2 * 2 :]
        )
        compressor = zstandard.ZstdCompressor(level=3)
        return min(len(piece), len(compressor.compress(piece)), len(compressor.compress(apart)))


class Library:
    """``ingot store``: all that lies in its folder counts, manifests too."""

    name = "library"

    def __init__(self, folder: Path) -> None:
        self._folder, self._library = folder, ingot.Library(folder)
        self._size = 0

    def add(self, folder: Path) -> int:
        """Take a model's files in; return the bytes by which the store grew, after having got them back."""
        self._library.add(folder)
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as around:
            self._library.get(folder.name, Path(around) / "back")
            for path in folder.iterdir():
                assert (Path(around) / "back" / path.name).read_bytes() == path.read_bytes()
        before = self._size
        self._size = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        return self._size - before


def models(base: Path, around: Path) -> Iterator[tuple[str, Path]]:
    """Yield the base and its fine-tunes, each as a folder that goes when the next one is asked for."""
    yield "base", Path(shutil.copytree(base, around / "base"))
    with ingot.open(base) as checkpoint:
        tensors, metadata = checkpoint.state_dict(), checkpoint.metadata
    seed = 0
    for kind, count in KINDS:
        for _ in range(count):
            seed += 1
            folder = around / f"tune-{seed}"
            folder.mkdir()
            ingot.save(folder / "model.safetensors", tuned(tensors, kind, seed), metadata)
            for path in base.iterdir():
                if path.suffix == ".json" and not path.name.endswith(".index.json"):
                    shutil.copy(path, folder)
            yield kind, folder
            shutil.rmtree(folder)


def measure(base: Path) -> list[Row]:
    """Return a row per kind of model and one for all: bytes by store, and the seconds that each took in all."""
    kinds = ["base", *(kind for kind, _ in KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        stores: Sequence[Any] = (Whole(), Zstd(), Chunks(), PackedChunks(), Library(Path(folder) / "library"))
        rows = {kind: {"models": kind, "count": 0, **{store.name: 0 for store in stores}} for kind in (*kinds, "all")}
        seconds: Row = {"models": "seconds", "count": 0, **{store.name: 0.0 for store in stores}}
        for kind, path in models(base, Path(folder)):
            for store in stores:
                started = time.perf_counter()
                grown = store.add(path)
                seconds[store.name] += time.perf_counter() - started
                for row in (rows[kind], rows["all"]):
                    row[store.name] += grown
            for row in (rows[kind], rows["all"]):
                row["count"] += 1
    return [*rows.values(), seconds]


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown: MiB, and shares of the whole files."""
    names = list(rows[0])[2:]
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for row in rows[:-1]:
        cells = [
            f"{row[name] / 2**20:.1f} MiB" + (f" ({row[name] / row[names[0]]:.0%})" if name != names[0] else "")
            for name in names
        ]
        count = f"{row['count']} x " if row["models"] not in ("base", "all") else ""
        lines.append(f"| {count}{row['models']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder with bf16 weights; default: the model that ships with Ingot")
    parser.add_argument("--json", type=Path, help="file for the figures")
    asked = parser.parse_args()
    rows = measure(asked.model or SHIPPED)
    print(table(rows))
    print("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in list(rows[-1].items())[2:]))
    if asked.json:
        asked.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
