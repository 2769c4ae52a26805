"""Ranges that travel before they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.stores.remote import client, prefetch
from ingot.stores.remote.prefetch import Prefetcher
from ingot.stores.remote.source import RemoteSource
from tests.support.stores import rule_of
from tests.support.web import Fault, WebServer

pytest.importorskip("obstore")
RANGES = [(start, 1000 + start % 7) for start in range(0, 200_000, 2000)]
DATA = np.random.default_rng(3).bytes(210_000)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "WINDOW", 1 << 14)
    monkeypatch.setattr(prefetch, "MAX_AHEAD", 1 << 16)
    monkeypatch.setattr(client, "_PAUSE", 0.001)


class Reader:
    """Reads ``DATA``; knows how many bytes it was asked for."""

    def __init__(self) -> None:
        self.fails = False
        self.outs: list[memoryview] = []
        self.ahead = Prefetcher(self, gap=64)

    def __call__(self, tasks) -> None:
        for start, out in tasks:
            if self.fails:
                raise OSError
            self.outs.append(out)
            out[:] = DATA[start : start + out.nbytes]

    @property
    def read(self) -> int:
        return sum(out.nbytes for out in self.outs)

    def value(self, start: int, length: int) -> bytes:
        found = self.ahead.take(start, length)
        return b"" if found is None else bytes(found)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.ahead.stop()
    assert prefetch._QUEUE._held_bytes == 0
    assert not prefetch._QUEUE._waiting


@pytest.mark.parametrize("step", [1, -1, 37])
def test_each_range_is_given_once_in_any_order(reader: Reader, step: int) -> None:
    reader.ahead.expect(RANGES)
    order = [RANGES[index * step % len(RANGES)] for index in range(len(RANGES))]
    found = [reader.value(*item) for item in order]
    for (start, length), data in zip(order, found, strict=True):
        assert data in (b"", DATA[start : start + length])  # what was not on its way is left to the caller
    assert any(found)
    assert reader.read == sum(map(len, found))
    assert {reader.value(*item) for item in order} == {b""}


def test_a_range_is_taken_in_pieces_in_any_order_and_each_once(reader: Reader) -> None:
    reader.ahead.expect(RANGES[:5])
    start, length = RANGES[2]
    order = np.random.default_rng(0).permutation(length // 10)
    for at in order * 10:
        assert reader.value(start + at, 10) == DATA[start + at : start + at + 10]
        assert reader.value(start + at, 10) == reader.value(start + at + 5, 10) == b""
    last = length // 10 * 10
    assert reader.value(start + last - 5, 8) == b""
    assert reader.value(start + last, 20) == b""  # two ranges
    assert reader.value(start + last, length - last) == DATA[start + last : start + length]
    assert start not in reader.ahead._windows


def test_ranges_travel_in_the_order_in_which_they_are_expected(reader: Reader) -> None:
    reader.ahead.expect(reversed(RANGES))
    assert reader.value(*RANGES[0]) == b""  # the last, for which there was no room yet
    assert reader.value(*RANGES[-1]) == DATA[RANGES[-1][0] : sum(RANGES[-1])]


def test_a_large_range_is_read_into_its_own_memory(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy, whatever is read beside it; a small one is copied, and keeps no neighbour in memory."""
    monkeypatch.setattr(prefetch, "LARGE", 5000)
    ranges = [(0, 100), (100, 5000), (5100, 6000), (11_100, 100), (11_200, 100)]
    reader.ahead.expect(ranges)
    for start, length in ranges:
        found = reader.ahead.take(start, length)
        assert found == DATA[start : start + length]
        own = any(np.shares_memory(found, out) for out in reader.outs)
        assert own == (length >= 5000)
    assert sorted(out.nbytes for out in reader.outs) == [100, 200, 5000, 6000]


def test_several_threads_take_pieces_of_one_range(reader: Reader) -> None:
    reader.ahead.expect([(0, 200_000)])
    pieces = [(at, 1000) for at in range(0, 200_000, 1000)]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda item: reader.value(*item), pieces)] == [DATA[at : at + 1000] for at, _ in pieces]
    assert reader.read == 200_000


def test_no_more_waits_to_be_taken_than_is_allowed(reader: Reader) -> None:
    reader.ahead.expect(RANGES)
    for _ in range(100):
        assert prefetch._QUEUE._held_bytes <= 1 << 16
    reader.ahead.stop()
    assert reader.read <= 1 << 16
    assert reader.value(*RANGES[0]) == b""


def test_what_goes_wrong_is_left_to_those_who_read(reader: Reader) -> None:
    reader.fails = True
    reader.ahead.expect(RANGES)
    assert {reader.value(*item) for item in RANGES} == {b""}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    ingot.save(tmp_path / "m.zt", {f"w{index}": rng.standard_normal((64, 300), np.float32) for index in range(40)})
    ingot.convert(tmp_path / "m.zt", tmp_path / "q.zt", "int4")
    return tmp_path


def test_a_checkpoint_is_read_once_and_in_few_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "WINDOW", 1 << 20)
    monkeypatch.setattr(prefetch, "MAX_AHEAD", 1 << 24)
    data = (model / "m.zt").read_bytes()
    with WebServer({"m.zt": data}) as server, ingot.open(f"{server.url}/m.zt") as file:
        found = file.state_dict()
        assert server.sent <= len(data) * 1.02 + 4096
        assert server.requests() < 10
    with ingot.open(model / "m.zt") as near:
        assert all(np.array_equal(found[name], tensor.numpy()) for name, tensor in near.items())


def test_files_travel_in_the_order_of_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one whole file after the other: what is taken first may lie in the last of them."""
    values = {f"w{index}": np.full((8, 8), index, np.float32) for index in range(12)}
    ingot.save(tmp_path / "one.zt", values)
    ingot.convert(tmp_path / "one.zt", tmp_path / "m", format="safetensors", max_shard=1000)
    files = {f"m/{path.name}": path.read_bytes() for path in (tmp_path / "m").iterdir()}
    expected: list[tuple[str, int, int]] = []

    def note(source: RemoteSource, ranges: Sequence[tuple[int, int]]) -> None:
        expected.extend((source.name, *item) for item in ranges)

    with WebServer(files, listing=True) as server, ingot.open(f"{server.url}/m/") as file:
        monkeypatch.setattr(RemoteSource, "expect", note)
        order = [f"w{index}" for index in (11, 0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9)]
        file.read_ahead(order)
        parts = [file[name].parts["data"] for name in order]
        assert len({part.source.name for part in parts}) > 2
        assert expected == [(part.source.name, part.offset, part.length) for part in parts]


def test_a_proven_part_that_is_read_in_steps_travels_once(model: Path) -> None:
    data = (model / "q.zt").read_bytes()
    with WebServer({"q.zt": data}) as server, ingot.open(f"{server.url}/q.zt") as file:
        part = next(tensor for tensor in file.values() if tensor.codec == "affine").parts["packed_weight"]
        before, out = server.sent, bytearray(part.nbytes)
        reader, view = part.reader(), memoryview(out)
        for at in range(0, part.nbytes, 1000):
            reader.readinto(view[at : at + 1000])
        reader.finish()
        assert out == data[part.offset : part.offset + part.length]
        assert server.sent - before <= part.length


@pytest.mark.parametrize("times", [1, 9])
def test_a_bad_range_of_a_packed_tensor_is_asked_for_once_more(model: Path, times: int) -> None:
    data = (model / "q.zt").read_bytes()
    with WebServer({"q.zt": data}) as server, ingot.open(f"{server.url}/q.zt") as file:
        name = next(name for name, tensor in file.items() if tensor.codec == "affine")
        part = file[name].parts["packed_weight"]
        left = [times]

        def fault(request) -> Fault | None:
            first, last = request.range or (0, None)
            if not (first <= part.offset and (last is None or part.offset < last)) or not left[0]:
                return None
            left[0] -= 1
            return Fault(flip=part.offset + 1)

        server.fault = fault
        file.read_ahead()

        def read() -> bytes:
            return bytes(file[name].private().parts["packed_weight"].view())

        if times == 1:
            assert read() == data[part.offset : part.offset + part.length]
            assert not left[0]
        else:
            with pytest.raises(IngotError) as caught:
                read()
            assert rule_of(caught.value) == "part.digest-mismatch"
