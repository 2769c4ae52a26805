"""Layers that compressed-tensors 0.20 itself packed decode to what it decompresses them to, bit for bit.

Made by ``make_compressed_tensors.py``, in an environment that has the package.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from ingot.testing.entries import stored_entries

ROOT = Path(__file__).with_name("compressed_tensors")
WEIGHT = "model.layers.0.mlp.up_proj.weight"
FOLDERS = sorted(path.name for path in ROOT.iterdir())


def test_the_corpus_is_whole() -> None:
    assert len(FOLDERS) == 11


@pytest.mark.parametrize("name", FOLDERS)
def test_values_are_the_package_s_own(name: str, tmp_path: Path) -> None:
    with ingot.open(ROOT / name / "expected.safetensors") as expected:
        wanted = expected[WEIGHT].numpy()
    ingot.convert(ROOT / name, tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="compressed-tensors")
    assert stored_entries(tmp_path / "back") == stored_entries(ROOT / name)  # as the package writes them
    for path in (ROOT / name, tmp_path / "m.zt", tmp_path / "back"):
        with ingot.open(path) as checkpoint:
            values = checkpoint[WEIGHT].numpy()
            assert (values.dtype, values.tobytes()) == (wanted.dtype, wanted.tobytes())
