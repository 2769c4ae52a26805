"""How many requests each format needs before the first weight, of a store where each one is a journey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.formats.table import FORMATS
from ingot.stores.memory import MemoryStore
from tests.support.stores import CountingStore

TENSORS = 150
MOST = {"safetensors": 2, "zt": 3, "squizd": 8, "sparse": 8, "quantized": 8, "int4": 8}


def weights(seed: int, shape: tuple[int, int], count: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    names = (f"model.layers.{index // 10}.mlp.t{index % 10}_proj.weight" for index in range(count))
    return {name: generator.standard_normal(shape).astype(np.float32) for name in names}


def artifact(folder: Path, kind: str, shape: tuple[int, int] = (8, 128), count: int = TENSORS) -> Path:
    """Return a file or folder of tensors: an archive, or a delta by the strategy that ``kind`` names."""
    base, other = folder / "a.safetensors", folder / "b.safetensors"
    ingot.save(base, weights(0, shape, count))
    if kind == "safetensors":
        return base
    if kind == "npydir":
        ingot.convert(base, folder / "m", recipe="squish-int4", format="npydir")
        return folder / "m"
    if kind in ("zt", "squizd"):
        ingot.convert(base, folder / f"m.{kind}", recipe="int4")
        return folder / f"m.{kind}"
    ingot.save(other, weights(1, shape, count))
    ingot.diff(base, other, folder / "m.wdelta", strategy=kind)
    return folder / "m.wdelta"


def opened(path: Path) -> CountingStore:
    """Open an artifact and make every tensor, reading no weight."""
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        name, kind = "manifest.json", "npydir"
    else:
        files, name, kind = {path.name: path.read_bytes()}, path.name, path.suffix[1:]
    store = CountingStore(MemoryStore(files))
    tensors = FORMATS[kind].read(store, name).tensors
    assert len([tensor.shape for tensor in tensors.values()]) == TENSORS
    return store


@pytest.mark.parametrize("kind", MOST)
def test_a_file_is_opened_with_few_requests(tmp_path, kind):
    store = opened(artifact(tmp_path, kind))
    assert store.requests <= MOST[kind]
    assert len(store.opened) == 1


@pytest.mark.parametrize(("kind", "journeys"), [("squizd", 8), ("sparse", 4), ("quantized", 4), ("int4", 4)])
def test_heads_far_apart_are_asked_for_together(tmp_path, kind, journeys):
    """Blocks and records too large to be read over: a range for each head, in few journeys, and no weights."""
    path = artifact(tmp_path, kind, (128, 640), 40)
    store = CountingStore(MemoryStore({path.name: path.read_bytes()}), gap=1 << 12)
    assert len(FORMATS[path.suffix[1:]].read(store, path.name).tensors) == 40
    assert store.journeys <= journeys
    assert store.nbytes < path.stat().st_size / 4


def test_a_folder_is_listed_once_and_each_file_is_read_once(tmp_path):
    store = opened(artifact(tmp_path, "npydir", (32, 128)))
    assert sorted(store.listed) == ["", "tensors"]
    assert len(store.opened) == len(set(store.opened)) == store.requests == 2 + 4 * TENSORS
