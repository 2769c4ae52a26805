"""Folders that bitsandbytes and compressed-tensors wrote: the values are those that the packages themselves decode.

``make_small_floats.py`` makes the files. Bit for bit in the type that the package gives: of NVFP4 that is bf16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import dtype
from ingot.errors import UnsupportedError
from tests.support.entries import stored_entries

ROOT = Path(__file__).parent / "small_floats"
BNB = "bitsandbytes"
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


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_written_as_the_package_has_them(name: str, tmp_path: Path) -> None:
    """Through a ``.zt`` and back: the same entries, byte for byte."""
    with ingot.open(ROOT / name) as checkpoint:
        format = checkpoint.format
        ingot.save(tmp_path / "moved.zt", ingot.views.drop(checkpoint, ["int8.weight"] if format == BNB else []))
    report = ingot.convert(tmp_path / "moved.zt", tmp_path / "back", format=format)
    assert set(report.actions) == {"moved"}
    wanted, found = stored_entries(ROOT / name), stored_entries(tmp_path / "back")
    left = {key for key in wanted if key not in found}
    assert left == ({"int8.weight", "int8.SCB", "int8.weight_format"} if format == BNB else set())
    assert found == {key: wanted[key] for key in found}


def test_rows_of_eight_bits_are_written_apart(tmp_path: Path) -> None:
    """A folder of bitsandbytes has layers of four bits, or of eight: its configuration says which."""
    with ingot.open(ROOT / BNB) as checkpoint:
        ingot.save(tmp_path / "eight.zt", {"int8.weight": checkpoint["int8.weight"]})
    ingot.convert(tmp_path / "eight.zt", tmp_path / "back", format=BNB)
    wanted, found = stored_entries(ROOT / BNB), stored_entries(tmp_path / "back")
    assert found == {key: wanted[key] for key in found}
    assert len(found) == 3
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(ROOT / BNB, tmp_path / "both", format=BNB)
    assert caught.value.rule == "bitsandbytes.mixed"
