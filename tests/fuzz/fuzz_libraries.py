"""Fuzzes libraries: any manifest and objects are read, checked and got, or end in an IngotError.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_libraries -max_total_time=600

Findings are written to the current folder as crash-*; ``python -m tests.fuzz.fuzz_libraries crash-...`` replays one. By
its first byte an input is the bytes of one file of a library, or a series of choices: values of a manifest are changed,
whose digest is put right then, and names and bytes of objects. An artifact that is got is the one that was added.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris
import numpy as np

import ingot
from ingot.errors import IngotError
from ingot.library import manifest
from tests.fuzz.common import VALUES, as_json, changed, fuzz
from tests.support.reading import checked

BASE = Path(tempfile.mkdtemp(prefix="ingot-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
LIBRARY = BASE / "library"


def prepare() -> dict[str, bytes]:
    """Return the files of a library that has a model, a fine-tune and a quantized copy."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((64, 64)) * 0.02).astype(np.float16)
    tensors = {"model.layers.0.mlp.up_proj.weight": values, "n": values[0], "z": np.zeros((64, 64), np.float32)}
    tuned = values.copy()
    tuned[0, :8] += np.float16(0.001)
    library = ingot.Library(LIBRARY)
    for name, up in (("a", values), ("b", tuned)):
        (BASE / name).mkdir()
        ingot.save(BASE / name / "model.safetensors", {**tensors, "model.layers.0.mlp.up_proj.weight": up})
        (BASE / name / "config.json").write_text("{}")
        library.add(BASE / name, f"org/{name}")
    files = {path.relative_to(LIBRARY).as_posix(): path.read_bytes() for path in LIBRARY.rglob("*") if path.is_file()}
    return {name: data for name, data in files.items() if not name.startswith(".")}


FILES = prepare()
MANIFESTS = [name for name in FILES if name.startswith("artifacts/")]
OBJECTS = [name for name in FILES if name.startswith("objects/")]
IDS = [name.removeprefix("objects/").removesuffix(".zt") for name in OBJECTS]
CHOICES = [*VALUES, *IDS, *(id[:64] for id in IDS), "f16", "bf16", "data", "model.safetensors", "blake3:" + "0" * 64]
CHOICES += [{"zeros": 5}, {"bytes": "AAAA"}, {"object": IDS[0][:64], "size": 8192}, {"zeros": 2**40}]


def chosen(data: atheris.FuzzedDataProvider) -> dict[str, bytes]:
    """Return the files of a library in which a few things are others."""
    files = dict(FILES)
    for _ in range(data.ConsumeIntInRange(1, 3)):
        kind, name = data.ConsumeIntInRange(0, 5), data.PickValueInList(MANIFESTS if data.ConsumeBool() else OBJECTS)
        if name not in files:
            continue
        if name in MANIFESTS and kind:
            root = changed(data, json.loads(FILES[name]), CHOICES)
            if isinstance(root, dict) and kind > 1:
                fields = {key: value for key, value in root.items() if key != "digest"}
                with suppress(ValueError):
                    root["digest"] = manifest._digest(fields)
            files[name] = as_json(root)
        elif kind == 1:
            del files[name]
        elif kind == 2:
            files[f"objects/{data.PickValueInList(IDS)}-{data.PickValueInList(IDS)[:64]}.zt"] = files[name]
        elif kind == 3:
            files[f"objects/{data.PickValueInList(['0' * 64, 'x', IDS[0][:64]])}.zt"] = files[name]
        else:
            content, place = bytearray(files[name]), data.ConsumeIntInRange(0, len(files[name]) - 1)
            piece = data.ConsumeBytes(8) or b"\xff"
            content[place : place + len(piece)] = piece
            files[name] = bytes(content)
    return files


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    if data[:1] >= b"\xc0":
        names = sorted(FILES)
        files = {**FILES, names[data[0] % len(names)]: data[1:]}
    else:
        files = chosen(atheris.FuzzedDataProvider(data[1:]))
    shutil.rmtree(LIBRARY, ignore_errors=True)
    for name, content in files.items():
        (LIBRARY / name).parent.mkdir(parents=True, exist_ok=True)
        (LIBRARY / name).write_bytes(content)
    library, choice = ingot.Library(LIBRARY), sum(data) % 6
    if choice == 0:
        run(library.ls)
        run(library.verify)
        run(lambda: library.gc(dry_run=True))
    else:
        name = "ab"[choice % 2]
        run(lambda: read(library, f"org/{name}") if choice < 3 else get(library, name))


def run(call: Any) -> None:
    """Call a function that may raise an IngotError."""
    try:
        repr(call())
    except IngotError as error:
        checked(error)


def read(library: ingot.Library, name: str) -> None:
    """Open an artifact where it lies, and decode its tensors."""
    with ingot.open(library.url_of(name)) as checkpoint:
        for tensor in checkpoint.values():
            run(tensor.numpy)


def get(library: ingot.Library, name: str) -> None:
    """Get an artifact; what is written is what the manifest says."""
    target = BASE / "got"
    shutil.rmtree(target, ignore_errors=True)
    library.get(f"org/{name}", target)
    written = json.loads((LIBRARY / "artifacts" / "org" / f"{name}.json").read_bytes())
    files = target.rglob("*") if target.is_dir() else [target]
    sizes = sorted(path.stat().st_size for path in files if path.is_file())
    if sizes != sorted(file["size"] for file in written["files"]):
        raise AssertionError("expected the files that the manifest names")


if __name__ == "__main__":
    fuzz(one_input, [bytes([0xC0 + index]) + FILES[name] for index, name in enumerate(sorted(FILES))], 32768)
