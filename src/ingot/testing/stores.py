"""The test suite of stores."""

from __future__ import annotations

import builtins
import json
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.model.bytesource import Range, Stamp, StampedSource
from ingot.model.store import Listing, Store

ESCAPES = ("", ".", "..", "../a", "a/../../b", "/etc/passwd", "a//b", "a/", "nul\0", "./a")


class StoreSuite:
    """Base class of the tests of a store; a subclass implements ``make``."""

    data = bytes(range(256)) * 40

    @abstractmethod
    def make(self, folder: Path, files: Mapping[str, bytes]) -> Store:
        """Return a store with these files; ``folder`` is empty and may be used."""

    def test_names_are_sorted(self, tmp_path: Path) -> None:
        assert self.make(tmp_path, {"b": b"1", "a": b"", "c.x": b"2"}).names() == ["a", "b", "c.x"]

    def test_folders_and_their_files_are_listed(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"a": b"1", "sub/b": b"2", "sub/.hidden": b"", "sub/a.x": b"3", "sub/in/c": b""})
        assert (store.folders(), store.names(), store.names("sub")) == (["sub"], ["a"], ["a.x", "b"])
        assert (store.folders("sub"), store.folders("missing")) == (["in"], [])
        assert store.names("missing") == store.names("a") == []
        assert store.outside() == store.outside("sub") == []
        source = store.open("sub/b")
        assert bytes(source.view(0, 1)) == b"2"
        source.close()

    def test_a_listing_has_hidden_names_too(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"a": b"1", ".b": b"2", "sub/.c": b"", "sub/in/d": b""})
        assert store.list() == Listing((".b", "a"), ("sub",))
        assert store.list("sub") == Listing((".c",), ("in",))
        assert store.list("missing") == store.list("a") == Listing()
        assert [name for name in (".b", "b", "sub/.c", "sub", "missing/a") if store.exists(name)] == [".b", "sub/.c"]

    def test_a_stamp_is_that_of_the_open_file_and_goes_through_json(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"a": self.data})
        stamp = store.stat("a")
        source = store.open("a")
        assert stamp.size == len(self.data)
        assert stamp == (source.stamp if isinstance(source, StampedSource) else Stamp(source.size))
        assert Stamp(*json.loads(json.dumps(stamp))) == stamp
        source.close()
        with pytest.raises(UsageError) as caught:
            store.stat("b")
        assert caught.value.rule == "store.missing"

    @pytest.mark.parametrize(
        "ranges",
        [
            [],
            [(0, 10240)],
            [(5, 10), (0, 3), (9000, 100), (5, 10), (7, 2), (10240, 0)],
            [(start, 7) for start in range(0, 10000, 500)],
        ],
    )
    def test_ranges_come_in_the_order_in_which_they_were_asked_for(
        self, tmp_path: Path, ranges: builtins.list[Range]
    ) -> None:
        buffers = self.make(tmp_path, {"a": self.data}).get_ranges("a", ranges)
        assert [bytes(buffer) for buffer in buffers] == [self.data[start : start + size] for start, size in ranges]

    def test_a_range_outside_among_others_is_refused(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"a": self.data})
        for invalid in ((10239, 2), (10241, 0), (2**70, 1), (-1, 1), (0, -1)):
            with pytest.raises(IntegrityError) as caught:
                store.get_ranges("a", [(0, 4), invalid])
            assert caught.value.rule == "store.short-read"

    def test_whole_small_files_and_their_heads(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"a": self.data, "b": b"12"})
        assert (store.head("a", 5), store.head("b", 5)) == (self.data[:5], b"12")
        assert store.read("b", 2, "test.long") == b"12"
        with pytest.raises(FormatError) as caught:
            store.read("a", 10239, "test.long")
        assert caught.value.rule == "test.long"

    def test_the_tree_names_what_lies_at_any_depth(self, tmp_path: Path) -> None:
        store = self.make(tmp_path, {"b": b"1", "a/x": b"2", "a/y/z": b"3", "a/.hidden": b"4"})
        assert [*store.tree()] == ["a/.hidden", "a/x", "a/y/z", "b"]
        assert [*store.tree("a")] == ["a/.hidden", "a/x", "a/y/z"]

    def test_a_local_path_leads_to_the_bytes(self, tmp_path: Path) -> None:
        path = self.make(tmp_path, {"sub/a": self.data}).local_path("sub/a")
        assert path is None or Path(path).read_bytes() == self.data

    @pytest.mark.parametrize("name", ESCAPES)
    def test_names_that_lead_elsewhere_are_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(FormatError) as caught:
            self.make(tmp_path, {"a": b"1"}).open(name)
        assert caught.value.rule == "store.escape"

    def test_a_missing_file_is_a_usage_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            self.make(tmp_path, {"a": b"1"}).open("b")
        assert caught.value.rule == "store.missing"

    @pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 1), (3, 5000), (10239, 1), (10240, 0), (0, 10240)])
    def test_view_and_readinto_agree_with_the_bytes(self, tmp_path: Path, offset: int, length: int) -> None:
        source = self.make(tmp_path, {"a": self.data}).open("a")
        assert source.size == len(self.data)
        expected = self.data[offset : offset + length]
        assert bytes(source.view(offset, length)) == expected
        out = bytearray(length)
        source.readinto(offset, memoryview(out))
        assert out == expected
        source.close()

    @pytest.mark.parametrize(
        ("offset", "length"), [(10240, 1), (0, 10241), (2**70, 1), (0, 2**70), (-1, 1), (-5, 1), (5, -1)]
    )
    def test_ranges_outside_are_refused(self, tmp_path: Path, offset: int, length: int) -> None:
        source = self.make(tmp_path, {"a": self.data}).open("a")
        with pytest.raises(IntegrityError) as caught:
            source.view(offset, length)
        assert caught.value.rule == "store.short-read"
        source.close()

    def test_readinto_past_the_end_is_refused(self, tmp_path: Path) -> None:
        source = self.make(tmp_path, {"a": self.data}).open("a")
        with pytest.raises(IntegrityError) as caught:
            source.readinto(len(self.data) - 1, memoryview(bytearray(2)))
        assert caught.value.rule == "store.short-read"
        source.close()

    def test_an_empty_file_has_an_empty_view(self, tmp_path: Path) -> None:
        source = self.make(tmp_path, {"a": b""}).open("a")
        assert source.size == 0
        assert source.view(0, 0).nbytes == 0
        source.readinto(0, np.empty((0, 3), np.float32).data)
        source.close()

    def test_readinto_takes_any_element_type(self, tmp_path: Path) -> None:
        source = self.make(tmp_path, {"a": self.data}).open("a")
        out = np.empty((4, 5), np.float32)
        source.readinto(16, out.data)
        assert out.tobytes() == self.data[16:96]
        source.close()

    def test_views_stay_valid_after_close(self, tmp_path: Path) -> None:
        source = self.make(tmp_path, {"a": self.data}).open("a")
        array = np.frombuffer(source.view(100, 1000), np.uint8)
        source.close()
        source.close()
        assert array.tobytes() == self.data[100:1100]

    def test_threads_read_side_by_side(self, tmp_path: Path) -> None:
        source = self.make(tmp_path, {"a": self.data}).open("a")

        def read(offset: int) -> bool:
            out = bytearray(100)
            source.readinto(offset, memoryview(out))
            return out == self.data[offset : offset + 100] == bytes(source.view(offset, 100))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(0, 10000, 37)))
        source.close()
