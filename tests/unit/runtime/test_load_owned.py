"""Owned arrays: the same values as ``Tensor.numpy``, writable, theirs alone, whatever the threads."""

from __future__ import annotations

import numpy as np
import pytest

import ingot.numpy
from ingot.artifacts import owned_arrays as module
from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.owned_arrays import load_arrays
from ingot.artifacts.state_dict import open_bytes, save_bytes
from ingot.errors import IngotError, IntegrityError, UsageError

ARRAYS = {
    "big": np.arange(300_000, dtype=np.float32).reshape(300, 1000),
    "small": np.arange(10, dtype=np.int16),
    "empty": np.zeros((0, 4), np.float64),
    "scalar": np.array(3.5, np.float16),
    "bool": np.arange(5000) % 3 == 0,
    "complex": np.arange(6, dtype=np.complex64).reshape(2, 3),
}


def check(loaded, names=tuple(ARRAYS)):
    assert sorted(loaded) == sorted(names)
    for name in names:
        array = loaded[name]
        expected = ARRAYS[name]
        assert (array.dtype, array.shape, array.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert array.flags.owndata
        assert array.flags.writeable


@pytest.mark.parametrize("suffix", ["safetensors", "zt"])
@pytest.mark.parametrize("workers", [0, 1, 3, None])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_values_are_those_of_the_file(tmp_path, monkeypatch, suffix, workers, io):
    monkeypatch.setattr(module, "CHUNK", 100_000)
    monkeypatch.setattr(module, "BATCH", 10_000)
    path = tmp_path / f"m.{suffix}"
    ingot.numpy.save_file(ARRAYS, path)
    with open_checkpoint(path, io=io) as checkpoint:
        loaded = load_arrays(checkpoint, workers=workers)
    check(loaded)
    assert list(ingot.numpy.load_file(path)) == list(loaded)


def test_names_are_chosen_in_order(tmp_path):
    with open_bytes(save_bytes(ARRAYS)) as checkpoint:
        loaded = load_arrays(checkpoint, ["small", "big"])
        assert list(loaded) == ["small", "big"]
        check(loaded, ("small", "big"))
        with pytest.raises(UsageError) as caught:
            load_arrays(checkpoint, ["small", "none"])
    assert caught.value.rule == "tensor.unknown"


def test_nothing_to_load():
    with open_bytes(save_bytes({})) as checkpoint:
        assert load_arrays(checkpoint) == {}


def test_a_damaged_part_is_found_on_the_way(tmp_path):
    path = tmp_path / "m.zt"
    ingot.numpy.save_file({"x": np.arange(100_000, dtype=np.float32)}, path)
    data = bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        ingot.numpy.load_file(path)
    assert caught.value.rule == "part.digest-mismatch"
    with open_checkpoint(path, verify=False) as checkpoint:
        assert load_arrays(checkpoint)["x"].size == 100_000


def test_a_bool_that_is_neither_is_refused():
    data = save_bytes({"b": np.zeros(10, np.bool_)})
    with pytest.raises(IngotError) as caught, open_bytes(data[:-1] + b"\2") as checkpoint:
        load_arrays(checkpoint)
    assert caught.value.rule == "dense.bool"


def test_the_source_may_be_replaced_while_arrays_live(tmp_path):
    path = tmp_path / "m.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    loaded = ingot.numpy.load_file(path)
    loaded["small"] += 1
    ingot.numpy.save_file(loaded, path)
    assert ingot.numpy.load_file(path)["small"].tolist() == list(range(1, 11))


def test_bytes_do_not_change():
    data = save_bytes(ARRAYS, {"a": "b"})
    kept = bytes(bytearray(data))
    loaded = ingot.numpy.load(data)
    loaded["big"] += 1
    assert data == kept
    assert save_bytes(ARRAYS, {"a": "b"}, format="safetensors") == data
    check(ingot.numpy.load(save_bytes(ARRAYS, format="zt")))
