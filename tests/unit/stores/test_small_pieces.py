"""Small ranges that are read and written one after the other: few system calls, the same bytes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import ResourceError, UsageError
from ingot.stores.local import LocalSink, LocalStore


def open_pread(path):
    return LocalStore(path.parent, "pread").open(path.name)


class TestLateSink:
    """Small pieces wait for others; what comes out is what was written, whoever reads it after ``flush``."""

    @given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 6000), st.sampled_from("wrft")), max_size=30))
    def test_what_is_written_is_there(self, pieces):
        wanted, end = bytearray(), 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a"
            sink = LocalSink(path, late=True)
            for index, (step, size, then) in enumerate(pieces):
                offset, data = (end if step > 20 else max(0, end - step)), bytes([index + 1]) * size
                sink.write_at(offset, data)
                wanted.extend(bytes(max(0, offset + size - len(wanted))))
                wanted[offset : offset + size] = data
                end = offset + size
                if then == "r" and wanted:
                    out = bytearray(len(wanted))
                    sink.readinto(0, memoryview(out))
                    assert out == wanted
                elif then == "f":
                    sink.flush()
                    assert path.read_bytes() == wanted
                elif then == "t":
                    del wanted[end:]
                    sink.truncate(end)
            sink.close()
            assert path.read_bytes() == wanted

    def test_small_pieces_go_to_the_file_together(self, tmp_path, monkeypatch):
        calls, real = [], os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: calls.append(at) or real(fd, data, at))
        sink = LocalSink(tmp_path / "a", late=True)
        for index in range(1000):
            sink.write_at(64 * index, bytes(64))
        sink.close()
        assert calls == [0]

    def test_a_full_disk_is_told_at_the_latest_when_it_closes(self):
        sink = LocalSink(Path("/dev/full"), late=True)
        sink.write_at(0, b"x")
        with pytest.raises(ResourceError) as caught:
            sink.close()
        assert caught.value.rule == "store.disk-full"


class TestReadAhead:
    """Small ranges in order come from one read; what is asked for again comes from the file."""

    def test_ranges_in_order_take_few_calls(self, tmp_path, monkeypatch):
        path = tmp_path / "a"
        path.write_bytes(bytes(range(256)) * 256)
        source, calls, real = open_pread(path), [], os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, out, at: calls.append(at) or real(fd, out, at))
        for offset in range(0, 1 << 15, 64):
            out = bytearray(48)
            source.readinto(offset, memoryview(out))
            assert out == path.read_bytes()[offset : offset + 48]
        assert len(calls) < 5

    @given(st.lists(st.tuples(st.integers(0, 70000), st.integers(0, 5000)), max_size=20), st.booleans())
    def test_bytes_are_those_of_the_file(self, ranges, ordered):
        data = bytes(range(251)) * 300
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a"
            path.write_bytes(data)
            source = open_pread(path)
            for offset, size in sorted(ranges) if ordered else ranges:
                out = bytearray(size)
                source.readinto(offset, memoryview(out))
                assert out == data[offset : offset + size]
            source.close()

    def test_what_is_asked_for_again_comes_from_the_file(self, tmp_path):
        path, out = tmp_path / "a", bytearray(64)
        path.write_bytes(bytes(1 << 12))
        source = open_pread(path)
        for offset in (0, 64, 128):
            source.readinto(offset, memoryview(out))
        with path.open("r+b") as file:
            file.write(b"\1" * (1 << 12))
        source.readinto(64, memoryview(out))
        assert out == b"\1" * 64
        source.close()
        with pytest.raises(UsageError) as caught:
            source.readinto(192, memoryview(out))
        assert caught.value.rule == "store.closed"
