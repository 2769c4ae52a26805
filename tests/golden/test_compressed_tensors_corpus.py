"""Layers that compressed-tensors 0.20 itself packed decode to what it decompresses them to, bit for bit; those that
0.12.2 packed for Marlin's kernels with two of four weights left out, to what they were before.

Made by ``make_compressed_tensors.py`` and ``make_marlin_24.py``, in environments that have the packages.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import ingot
from tests.support.entries import stored_entries

ROOT = Path(__file__).with_name("compressed_tensors")
WEIGHT = "model.layers.0.mlp.up_proj.weight"
FOLDERS = sorted(path.name for path in ROOT.iterdir())


def test_the_corpus_is_whole() -> None:
    assert len(FOLDERS) == 14


@pytest.mark.parametrize("name", FOLDERS)
def test_values_are_the_package_s_own(name: str, tmp_path: Path) -> None:
    with ingot.open(ROOT / name / "expected.safetensors") as expected:
        wanted = expected[WEIGHT].numpy()
    ingot.convert(ROOT / name, tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="compressed-tensors")
    if not name.startswith(("marlin24", "int8")):  # which become pack-quantized
        assert stored_entries(tmp_path / "back") == stored_entries(ROOT / name)  # as the package writes them
    for path in (ROOT / name, tmp_path / "m.zt", tmp_path / "back"):
        with ingot.open(path) as checkpoint:
            values = checkpoint[WEIGHT].numpy()
            assert (values.dtype, values.tobytes()) == (wanted.dtype, wanted.tobytes())


def test_two_of_four_codes_are_told_apart(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "marlin24-4-channel", tmp_path / "x")
    with ingot.open(tmp_path / "x") as checkpoint:
        tensor = checkpoint[WEIGHT]
        assert np.array_equal(tensor[70:100], tensor.numpy()[70:100])  # rows within a block
        part = tensor.parts["meta"]
        at = part.offset
    with (tmp_path / "x" / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"\x55")
    with ingot.open(tmp_path / "x") as checkpoint, pytest.raises(ingot.IngotError) as caught:
        checkpoint[WEIGHT].numpy()
    assert caught.value.rule == "affine_words.meta"
