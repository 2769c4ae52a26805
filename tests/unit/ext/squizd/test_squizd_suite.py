"""``.squizd`` keeps what every format promises."""

from __future__ import annotations

import pytest

from ingot.errors import IngotError
from ingot.ext.squizd.format import SquizdFormat
from ingot.formats.base import WriteOptions
from ingot.stores.memory import MemoryStore
from ingot.testing.formats import FormatSuite


class SquizdSuite(FormatSuite):
    """A file that ends where its directory begins is a file of the SQUIZD document: it opens, without names."""

    format = SquizdFormat()
    __test__ = False

    def test_truncation_anywhere_is_refused(self) -> None:
        target, (name,) = self.write(self.sample())
        data = bytes(target.files[name])
        directory = data.rindex(b"TDIR")
        for length in range(len(data)):
            store = MemoryStore({name: data[:length]})
            if length != directory:
                with pytest.raises(IngotError) as caught:
                    self.format.read(store, name)
                assert caught.value.rule
                continue
            catalog = self.format.read(store, name)
            assert [rule for rule, _ in catalog.remarks] == ["squizd.no-directory"]
            for found, item in zip(catalog.tensors.values(), self.sample(), strict=True):
                assert bytes(found.parts["data"].view()) == bytes(item.parts["data"])


class TestSquizd(SquizdSuite):
    __test__ = True


class TestSquizdWithSha256(SquizdSuite):
    __test__ = True
    options = WriteOptions(digest="sha256")


class TestSquizdWithoutDigests(SquizdSuite):
    __test__ = True
    options = WriteOptions(digest=None)
