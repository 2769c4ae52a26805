"""The finalized cache: a folder of .npy files, one per tensor."""

from __future__ import annotations

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.ext.squish.npydir.finalized import NpyFormat
from ingot.testing.formats import FormatSuite


class TestNpyFolder(FormatSuite):
    format = NpyFormat()

    def described(self, items, metadata=None):
        return {}  # arrays have no place for it

    def test_every_storage_dtype_is_carried(self):
        assert [name for name in ("f16", "f32", "f64", "i8", "u8", "i64", "bool") if self.refused(name)] == []
        assert self.refused("bf16")

    def refused(self, dtype):
        return self.format.why_unsupported(self.item("x", (2, 4), dtype).spec)

    def sample(self):
        shapes = {"a.weight": ((3, 4), "f32"), "b": ((5,), "f64"), "empty": ((0, 3), "f16"), "c": ((7,), "u8")}
        return [self.item(name, shape, dtype, seed) for seed, (name, (shape, dtype)) in enumerate(shapes.items())]

    def test_round_trip_of_nothing(self):
        assert self.format.entry([]) is None

    def test_it_claims_its_own_files(self):
        assert self.format.entry(["a.npy", "b.npy", ".ready"]) == "a.npy"
        assert self.format.entry(["a.npy", "manifest.json"]) is None
        assert not self.format.claims("a.npy", b"\x93NUMPY\x01\x00")


@pytest.fixture
def folder(tmp_path):
    for name in ("model.a.weight", "model.b.weight"):
        np.save(tmp_path / f"{name}.npy", np.arange(6, dtype=np.float16).reshape(2, 3))
    (tmp_path / ".ready").touch()
    return tmp_path


def test_what_numpy_saved_is_read(folder):
    with ingot.open(folder) as checkpoint:
        assert checkpoint.format == "npy"
        assert sorted(checkpoint) == ["model.a.weight", "model.b.weight"]
        assert np.array_equal(checkpoint["model.a.weight"].numpy(), np.arange(6, dtype=np.float16).reshape(2, 3))


def test_safe_keys_are_names_with_dots(folder):
    for path in list(folder.glob("*.npy")):
        path.rename(folder / (path.stem.replace(".", "__") + ".npy"))
    with ingot.open(folder) as checkpoint:
        assert sorted(checkpoint) == ["model.a.weight", "model.b.weight"]


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "x.npy"
    np.save(outside, np.zeros(3, np.float16))
    (folder / "model.c.npy").symlink_to(outside)
    with pytest.raises(IngotError) as caught:
        ingot.open(folder)
    assert caught.value.rule == "npydir.link"


def test_objects_are_never_opened(folder):
    np.save(folder / "model.c.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(IngotError) as caught:
        ingot.open(folder)
    assert caught.value.rule == "npydir.npy-object"


def test_names_that_would_not_come_back_are_refused(tmp_path):
    ingot.save(tmp_path / "x.zt", {"a__b": np.zeros(2, np.float16)})
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "x.zt", tmp_path / "out", format="npy")
    assert caught.value.rule == "npydir.collision"
