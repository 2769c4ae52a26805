"""Ranges joined into few requests, and headers served from a few larger reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import IngotError, IntegrityError
from ingot.model.reading.ranges import MAX_REQUEST, HeaderSource, coalesce, read_bytes
from ingot.stores.memory import MemoryStore
from tests.support.stores import CountingStore

DATA = bytes(range(251)) * 12_000  # three megabytes


def header_source(gap: int = 1 << 16, data: bytes = DATA, window: int = 1 << 16) -> tuple[HeaderSource, CountingStore]:
    store = CountingStore(MemoryStore({"a": data}), gap)
    return HeaderSource(store.open("a"), window), store


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), max_size=20), st.integers(0, 50), st.integers(1, 90)
)
def test_joined_ranges_hold_all_and_are_apart(ranges, gap, most):
    joined = coalesce(ranges, gap, most)
    assert joined == sorted(joined)
    for start, size in ranges:
        assert any(first <= start and start + size <= first + span for first, span in joined)
    for (first, span), (start, size) in pairwise(joined):
        assert start - (first + span) > gap or max(first + span, start + size) - first > most
    longest = max((size for _, size in ranges), default=0)
    assert all(span <= max(most, longest) for _, span in joined)


@given(st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 300), st.booleans()), max_size=30), st.integers(1, 400))
def test_a_header_source_gives_the_bytes_of_its_source(reads, window):
    data = DATA[:3000]
    source, _ = header_source(20, data, window)
    source.expect((start, size) for start, size, _ in reads[::3])
    for start, most, into in reads:
        size = min(most, len(data) - start)
        found = read_bytes(source, start, size) if into else bytes(source.view(start, size))
        assert found == data[start : start + size]


def test_what_lies_close_is_read_once():
    source, store = header_source()
    for start in range(0, 60_000, 100):
        read_bytes(source, start, 50)
    assert (store.requests, store.nbytes) == (1, 1 << 16)


def test_windows_grow_where_reading_goes_on_and_not_after_a_jump():
    source, store = header_source(data=bytes(12 << 20))
    for start in range(0, 1_300_000, 5_000):
        read_bytes(source, start, 10)
    assert store.requests == 3
    read = store.nbytes
    read_bytes(source, 11 << 20, 10)
    assert store.nbytes - read == 1 << 16


def test_what_is_expected_is_read_together():
    source, store = header_source(gap=1000)
    source.expect((start, 20) for start in range(0, 3_000_000, 30_000))
    for start in range(0, 3_000_000, 30_000):
        read_bytes(source, start + 5, 15)
    assert (store.journeys, store.requests, store.nbytes) == (1, 100, 2000)


def test_expecting_what_is_not_there_changes_nothing():
    source, store = header_source()
    source.expect([(-5, 10), (len(DATA) - 5, 10), (2**70, 5), (10, -3)])
    assert read_bytes(source, len(DATA) - 5, 5) == DATA[-5:]
    assert store.requests == 1


def test_large_pieces_pass_through():
    data = bytes(MAX_REQUEST + 2)
    source, store = header_source(data=data)
    for _ in range(2):
        assert len(source.view(0, MAX_REQUEST + 1)) == MAX_REQUEST + 1
    assert store.requests == 2


@pytest.mark.parametrize(("offset", "size"), [(len(DATA), 1), (-1, 1), (0, -1), (2**70, 0), (0, 2**70)])
def test_ranges_outside_are_refused_as_by_the_source(offset, size):
    source, _ = header_source()
    read_bytes(source, 0, 10)
    with pytest.raises(IngotError) as caught:
        source.view(offset, size)
    assert isinstance(caught.value, IntegrityError)
    assert caught.value.rule == "store.short-read"


def test_memory_is_bounded():
    source, _ = header_source(data=bytes(64 << 20), gap=1 << 20)
    for start in range(0, 64 << 20, 1 << 19):
        read_bytes(source, start, 100)
    assert sum(map(len, source._windows)) <= 16 << 20
