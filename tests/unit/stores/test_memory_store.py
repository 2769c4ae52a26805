"""MemoryStore, MemoryTarget, and the stores that fail on purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import FormatError, IngotError
from ingot.stores.location import Location
from ingot.stores.memory import MemoryStore, MemoryTarget, shared_files
from ingot.testing.stores import ESCAPES, StoreSuite
from tests.support.stores import CountingStore, FaultyStore, FullTarget, rule_of


class TestMemoryStore(StoreSuite):
    def make(self, folder, files):
        return MemoryStore(files)


class TestFolderOfMemory(StoreSuite):
    """A folder of what the process keeps under a name, found by its address."""

    def make(self, folder, files):
        kept = shared_files(folder.name)
        kept.update({f"in/{name}": bytearray(data) for name, data in files.items()}, other=bytearray(b"out"))
        return Location.parse(f"memory:{folder.name}/in").store()


class TestCountingStore(StoreSuite):
    def make(self, folder, files):
        return CountingStore(MemoryStore(files), gap=100)


def test_requests_are_counted_after_joining():
    store = CountingStore(MemoryStore({"a": bytes(1000)}), gap=10)
    store.get_ranges("a", [(500, 10), (0, 10), (20, 10), (520, 10)])
    assert (store.requests, store.journeys, store.nbytes, store.opened) == (2, 1, 60, ["a"])


@pytest.mark.parametrize("name", ESCAPES)
def test_targets_refuse_escapes(name):
    with pytest.raises(FormatError) as caught:
        MemoryTarget().create(name)
    assert caught.value.rule == "store.escape"


@given(st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=20)), max_size=12), st.integers(0, 100))
def test_writes_land_where_they_should(writes, size):
    target = MemoryTarget()
    sink = target.create("a")
    expected = bytearray(200)
    end = 0
    for offset, data in writes:
        sink.write_at(offset, data)
        expected[offset : offset + len(data)] = data
        end = max(end, offset + len(data)) if data or offset > end else end
    assert bytes(target.files["a"]).ljust(200, b"\0") == bytes(expected)
    sink.truncate(size)
    sink.close()
    assert bytes(target.files["a"]) == bytes(expected[: min(size, end)]).ljust(size, b"\0")


@pytest.mark.parametrize(
    ("fault", "rule"),
    [("error", "store.read-failed"), ("shrank", "store.shrank"), ("short-read", "store.short-read")],
)
def test_a_faulty_store_fails_at_its_read(fault, rule):
    source = FaultyStore(MemoryStore({"a": b"abcd"}), fail_at=2, fault=fault).open("a")
    assert bytes(source.view(0, 4)) == b"abcd"
    source.readinto(0, memoryview(bytearray(2)))
    with pytest.raises(IngotError) as caught:
        source.view(0, 1)
    assert rule_of(caught.value) == rule


def test_a_corrupting_store_changes_one_bit():
    source = FaultyStore(MemoryStore({"a": b"abcd"}), fail_at=1, fault="corrupt").open("a")
    assert bytes(source.view(0, 4)) == b"abcd"
    assert bytes(source.view(0, 4)) == b"abbd"


def test_a_full_target_says_so():
    target = FullTarget(MemoryTarget(), room=5)
    sink = target.create("a")
    sink.write_at(0, b"abc")
    with pytest.raises(IngotError) as caught:
        sink.write_at(3, b"def")
    assert rule_of(caught.value) == "store.disk-full"
