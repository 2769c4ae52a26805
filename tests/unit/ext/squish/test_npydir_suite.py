"""NpydirFormat against the suite that every format inherits."""

from __future__ import annotations

from ingot.core.numeric.dtypes import STORAGE_DTYPES
from ingot.ext.squish.npydir.format import NpydirFormat
from ingot.formats.base import WriteOptions
from ingot.testing.formats import FormatSuite


class TestNpydirSuite(FormatSuite):
    format = NpydirFormat()

    def sample(self):
        shapes = {"a.weight": ((3, 4), "f32"), "b": ((5,), "f64"), "empty": ((0, 3), "f16"), "c": ((7,), "u8")}
        return [self.item(name, shape, dtype, seed) for seed, (name, (shape, dtype)) in enumerate(shapes.items())]

    def test_every_storage_dtype_is_carried(self):
        """All but bf16, which a ``.npy`` file has no name for; see test_npydir_conversions for what becomes of it."""
        refused = [name for name in STORAGE_DTYPES if self.format.why_unsupported(self.item("x", (2, 4), name).spec)]
        assert refused == ["bf16"]


class TestWithSha256(TestNpydirSuite):
    options = WriteOptions(digest="sha256")


class TestWithoutDigests(TestNpydirSuite):
    options = WriteOptions(digest=None)
