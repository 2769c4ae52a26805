"""Archives beside lmzip, zipnn, zstd and xz: bytes and seconds for three folders, each restored and compared.

    python bench/archive.py --model FOLDER --json archive.json

``--model`` is a folder with bf16 weights, by default the model that ships with Ingot. From it are made: a folder as on
the Hugging Face Hub, with the weights again as one file and as pytorch_model.bin; a GGUF file in Q4_K; and three
checkpoints of a training run in f32 with Adam's states. All programs use two threads, except xz, which has no
multithreaded decoder for its default files. zstd and xz get a tar file, zipnn each file with its best element type.
Sizes are percentages of the files' bytes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zstandard
from zipnn import ZipNN

import ingot

SHIPPED = Path(__file__).resolve().parents[1] / "src" / "ingot" / "demo" / "data"
THREADS = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A program that compresses a folder into files under a path, and restores them into a new folder."""

    name: str
    pack: Callable[[Path, Path], None]
    unpack: Callable[[Path, Path], None]


def with_ingot() -> Program:
    return Program(
        "ingot archive",
        lambda source, out: (ingot.archive(source, out / "a.zt", threads=THREADS), None)[1],
        lambda packed, out: (ingot.restore(packed / "a.zt", out, threads=THREADS), None)[1],
    )


def with_lmzip() -> Program:
    program = shutil.which("lmz", path=str(Path(sys.executable).parent)) or "lmz"

    def run(*arguments: str) -> None:
        subprocess.run([program, *arguments, "-q", "-j", str(THREADS)], check=True)

    return Program(
        "lmzip",
        lambda source, out: run("compress", str(source), str(out / "a.lmz")),
        lambda packed, out: run("decompress", str(packed / "a.lmz"), str(out)),
    )


def with_tar(name: str, compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Program:
    def pack(source: Path, out: Path) -> None:
        with tarfile.open(out / "a.tar", "w") as archive:
            archive.add(source, ".")
        (out / "a.packed").write_bytes(compress((out / "a.tar").read_bytes()))
        (out / "a.tar").unlink()

    def unpack(packed: Path, out: Path) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(decompress((packed / "a.packed").read_bytes()))
            file.flush()
            with tarfile.open(file.name) as archive:
                archive.extractall(out, filter="data")

    return Program(name, pack, unpack)


def with_zstd(level: int) -> Program:
    return with_tar(
        f"zstd -{level}",
        zstandard.ZstdCompressor(level=level, threads=THREADS).compress,
        zstandard.ZstdDecompressor().decompress,
    )


def with_zipnn(dtype: str) -> Program:
    """Return zipnn for files of one element type; small files are stored as they are."""

    def codec() -> ZipNN:
        return ZipNN(bytearray_dtype=dtype, threads=THREADS)

    def pack(source: Path, out: Path) -> None:
        for path in files(source):
            data = path.read_bytes()
            target = out / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(codec().compress(bytearray(data)) if len(data) > 1 << 16 else data)

    def unpack(packed: Path, out: Path) -> None:
        for path in files(packed):
            data = path.read_bytes()
            target = out / path.relative_to(packed)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(codec().decompress(data) if data[:2] == b"ZN" else data)

    return Program("zipnn", pack, unpack)


def programs(dtype: str) -> list[Program]:
    xz = with_tar("xz", lzma.compress, lzma.decompress)
    return [with_ingot(), with_lmzip(), with_zipnn(dtype), with_zstd(3), with_zstd(19), xz]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tensors_of(folder: Path, max_elements: int) -> dict[str, torch.Tensor]:
    """Return the first tensors of a model, up to a number of elements."""
    tensors: dict[str, torch.Tensor] = {}
    with ingot.open(folder) as checkpoint:
        for name, tensor in checkpoint.items():
            if sum(value.numel() for value in tensors.values()) + tensor.size <= max_elements:
                tensors[name] = tensor.torch().clone()
    return tensors


def hub_folder(model: Path, out: Path) -> None:
    """Copy a model, and add its weights as one file and as pytorch_model.bin."""
    shutil.copytree(model, out)
    tensors = tensors_of(model, 1 << 40)
    ingot.torch.save_file(tensors, out / "consolidated.safetensors")
    torch.save(tensors, out / "pytorch_model.bin")


def gguf_folder(model: Path, out: Path) -> None:
    out.mkdir()
    ingot.convert(model, out / "model-Q4_K.gguf", recipe="q4_k")
    (out / "README.md").write_text("lmzip restores a folder with one file as a file\n")


def run_folder(model: Path, out: Path, max_elements: int) -> None:
    """Write three checkpoints of Adam: weights in f32 and both moments, which every step changes."""
    torch.manual_seed(0)
    weights = {name: value.float() for name, value in tensors_of(model, max_elements).items()}
    parameters = [torch.nn.Parameter(value) for value in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    for step in range(1, 31):
        for parameter in parameters:
            parameter.grad = 1e-3 * parameter.detach().std() * torch.randn_like(parameter)
        optimizer.step()
        if step % 10 == 0:
            folder = out / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            values = {name: item.detach() for name, item in zip(weights, parameters, strict=True)}
            ingot.torch.save_file(values, folder / "model.safetensors")
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def measure(program: Program, source: Path) -> Row:
    """Compress, restore and compare a folder; return bytes and seconds."""
    size = sum(path.stat().st_size for path in files(source))
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "packed"
        packed.mkdir()
        start = time.perf_counter()
        program.pack(source, packed)
        middle = time.perf_counter()
        restored = Path(temporary) / "restored"
        program.unpack(packed, restored)
        end = time.perf_counter()
        for path in files(source):
            if (restored / path.relative_to(source)).read_bytes() != path.read_bytes():
                raise SystemExit(f"{program.name}: {path} differs")
        stored = sum(path.stat().st_size for path in files(packed))
    return {
        "program": program.name,
        "size": size,
        "stored": stored,
        "percent": 100 * stored / size,
        "encode_seconds": middle - start,
        "decode_seconds": end - middle,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--elements", type=int, default=1 << 20, help="elements of the training checkpoints")
    parser.add_argument("--only", default="", help="the folder to measure: hub, gguf or run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            "hub": (lambda out: hub_folder(options.model, out), "bfloat16"),
            "gguf": (lambda out: gguf_folder(options.model, out), "bfloat16"),
            "run": (lambda out: run_folder(options.model, out, options.elements), "float32"),
        }
        for name, (make, dtype) in folders.items():
            if options.only not in ("", name):
                continue
            source = Path(temporary) / name
            make(source)
            results[name] = []
            print(f"{name}: {sum(path.stat().st_size for path in files(source)) / 1e6:.1f} MB")
            for program in programs(dtype):
                results[name].append(measure(program, source))
                show(results[name][-1])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def show(row: Row) -> None:
    """Print a row, with rates in MB of original bytes a second."""
    encode, decode = (row["size"] / 1e6 / max(row[key], 1e-9) for key in ("encode_seconds", "decode_seconds"))
    print(
        f"  {row['program']:14} {row['percent']:6.2f} %  pack {encode:7.1f} MB/s  unpack {decode:7.1f} MB/s", flush=True
    )


if __name__ == "__main__":
    main()
