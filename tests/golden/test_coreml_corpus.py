"""Packages that coremltools compressed: every array of a layer is read to the values that it decompresses to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import ingot

FOLDER = Path(__file__).parent / "coreml"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
# How Ingot reads the weights: as the package packs them, but for entries that no codec has and for casts.
CODECS = {"vectors-of-8": "dense", "cast": "dense", "sparse-palette-int8": "sparse_mask", "small-bias": "affine"}


def digests(path: Path) -> set[tuple[str, str, str]]:
    with ingot.open(path) as found:
        arrays = [tensor.numpy() for tensor in found.values()]
    return {
        (str(list(array.shape)), array.dtype.name, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest())
        for array in arrays
    }


def expected(name: str) -> set[tuple[str, str, str]]:
    return {(str(shape), dtype, digest) for shape, dtype, digest in EXPECTED[name]}


def test_every_package_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.mlpackage")} == {f"{name}.mlpackage" for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_array_is_read(name: str) -> None:
    path = FOLDER / f"{name}.mlpackage"
    assert expected(name) <= digests(path)
    assert not [finding for finding in ingot.verify(path) if finding.rule == "open.unread"]
    with ingot.open(path) as found:
        codecs = {tensor.codec for tensor in found.values() if len(tensor.shape) > 1}
    assert codecs == {CODECS.get(name, "palette")}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_kept_is_the_same_package(name: str, tmp_path: Path) -> None:
    report = ingot.convert(FOLDER / f"{name}.mlpackage", tmp_path / "b.mlpackage")
    assert set(report.actions) == {"moved"}
    for file in (MODEL, WEIGHTS):
        assert (tmp_path / "b.mlpackage" / file).read_bytes() == (FOLDER / f"{name}.mlpackage" / file).read_bytes()


@pytest.mark.parametrize("name", EXPECTED)
def test_values_survive_other_containers_and_decompression(name: str, tmp_path: Path) -> None:
    source = FOLDER / f"{name}.mlpackage"
    ingot.convert(source, tmp_path / "m.zt")
    ingot.convert(source, tmp_path / "m.safetensors", "decompress")
    ingot.convert(source, tmp_path / "b.mlpackage", "decompress")
    for path in ("m.zt", "m.safetensors", "b.mlpackage"):
        assert expected(name) <= digests(tmp_path / path)
