"""Folders that bitsandbytes and compressed-tensors wrote: the values are those that the packages themselves decode.

``make_small_floats.py`` makes the files. Bit for bit in the type that the package gives: of NVFP4 that is bf16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.dtypes import dtype

ROOT = Path(__file__).parent / "small_floats"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def test_nothing_is_missing() -> None:
    assert len(FOLDERS) == 9
    assert all((ROOT / f"{name}.safetensors").exists() for name in FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_values_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    ingot.convert(ROOT / name, tmp_path / "moved.zt")
    with (
        ingot.open(ROOT / f"{name}.safetensors") as wanted,
        ingot.open(ROOT / name) as folder,
        ingot.open(tmp_path / "moved.zt") as moved,
    ):
        assert set(folder) == set(wanted) == set(moved)
        for key, tensor in wanted.items():
            values = tensor.numpy()
            for checkpoint in (folder, moved):
                assert checkpoint[key].codec == "scaled_codebook"
                found = checkpoint[key].numpy(dtype(values.dtype).name)
                assert np.array_equal(found, values), key
                if not key.startswith("fp4-"):  # code 8 is +0 in bitsandbytes' table, -0 in its kernels
                    assert found.tobytes() == values.tobytes(), key
