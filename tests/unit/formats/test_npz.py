"""``.npz`` files of NumPy open as checkpoints; objects, and containers of Flax and Orbax, are refused by name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError

ARRAYS = {
    "layer.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(5, dtype=np.float16),
    "ids": np.arange(-3, 4),
    "mask": np.array([True, False]),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_open_and_convert(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.npz", **ARRAYS)
    with ingot.open(tmp_path / "x.npz") as checkpoint:
        assert set(checkpoint) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert checkpoint[name].dtype == {"float64": "f64"}.get(str(array.dtype), checkpoint[name].dtype)
            assert np.array_equal(checkpoint[name].numpy(), array)
        assert np.array_equal(checkpoint["layer.0.weight"][1:], ARRAYS["layer.0.weight"][1:])
    assert run(["convert", str(tmp_path / "x.npz"), str(tmp_path / "x.zt"), "-q"]) == 0
    with ingot.open(tmp_path / "x.zt") as written:
        assert all(np.array_equal(written[name].numpy(), array) for name, array in ARRAYS.items())


def rule_of(path: Path) -> str | None:
    with pytest.raises(IngotError) as error:
        ingot.open(path)
    assert "\n" not in str(error.value)
    return error.value.rule


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (np.array([{"a": 1}], object), "npydir.npy-object"),
        (np.arange(3, dtype=">f4"), "npydir.npy-byte-order"),
        (np.arange(6.0).reshape(2, 3).T, "npydir.npy-fortran"),
        (np.array(["text"]), "npydir.npy-dtype"),
    ],
)
def test_arrays_that_no_tensor_holds(tmp_path: Path, array: Any, rule: str) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(3), b=array)
    assert rule_of(tmp_path / "x.npz") == rule


def test_members_that_are_no_arrays(tmp_path: Path) -> None:
    for name, members in {"text": {"a.txt": b"x"}, "none": {}, "pickle": {"a.npy": b"\x80\x04N."}}.items():
        with zipfile.ZipFile(tmp_path / f"{name}.npz", "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data)
    assert rule_of(tmp_path / "text.npz") == "npz.member"
    assert rule_of(tmp_path / "pickle.npz") == "npydir.npy-magic"
    assert rule_of(tmp_path / "none.npz") is not None


def test_arrays_of_squish_need_their_manifest(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a__q=np.ones((2, 2), np.int8), a__s=np.ones(2, np.float32))
    assert rule_of(tmp_path / "x.npz") == "npz.manifest"


def test_truncated_and_damaged_archives(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **ARRAYS)
    data = buffer.getvalue()
    path = tmp_path / "x.npz"
    for size in (len(data) - 1, len(data) // 2, 4):
        path.write_bytes(data[:size])
        assert rule_of(path) is not None
    position = data.index(np.float32(7).tobytes())
    path.write_bytes(data[:position] + b"\xff" + data[position + 1 :])
    with pytest.raises(IngotError), ingot.open(path) as checkpoint:
        checkpoint["layer.0.weight"].numpy()


def test_flax_and_orbax_are_refused_by_name(tmp_path: Path) -> None:
    flax = tmp_path / "flax"
    flax.mkdir()
    (flax / "flax_model.msgpack").write_bytes(b"\x81\xa6params\x80")
    (flax / "config.json").write_text("{}")
    assert rule_of(flax / "flax_model.msgpack") == "detect.flax"
    assert rule_of(flax) == "detect.flax"
    for sign in ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"):
        folder = tmp_path / sign.strip("_.")
        (folder / "d").mkdir(parents=True)
        (folder / sign).write_text("{}")
        assert rule_of(folder) == "detect.orbax"
