"""Sizes in words, and memory figures."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.runtime import memory
from ingot.core.runtime.memory import anonymous_rss, available_ram, format_size, parse_size, peak_rss
from ingot.errors import ResourceError, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        (1234, 1234),
        ("1234", 1234),
        ("0", 0),
        ("10 B", 10),
        ("1k", 1024),
        ("1kB", 1000),
        ("1.5 GiB", 3 << 29),
        ("2g", 2 << 30),
        ("1TiB", 1 << 40),
        (" 3mib ", 3 << 20),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", -1, "1 XB", "1iB", "1.2.3", "nan", "inf", "1e9", None, True, 1.5, "1GiBx", "\u0661"]
)
def test_nonsense_is_refused(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.rule == "size.syntax"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10240, "10.0 KiB"),
        (102400, "100 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_size_in_words(count, expected):
    assert format_size(count) == expected


@given(st.integers(0, 2**60))
def test_words_say_about_the_same(count):
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.006, abs=1)


def test_anonymous_memory_counts_the_heap_and_not_mapped_files(tmp_path):
    size = 64 << 20
    before = anonymous_rss()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:  # never memory that was free before
        np.frombuffer(held, np.uint8)[:] = 1
        assert anonymous_rss() - before > 0.9 * size
        assert peak_rss() >= anonymous_rss()
    before = anonymous_rss()
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(size)
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        assert np.frombuffer(mapped, np.uint8).sum() == 0
    assert anonymous_rss() - before < 0.1 * size


def test_elsewhere_than_on_linux_the_system_is_asked_otherwise(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    assert peak_rss() > 10 << 20
    process = SimpleNamespace(
        memory_info=lambda: SimpleNamespace(rss=5 << 20), memory_full_info=lambda: SimpleNamespace(uss=3 << 20)
    )
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert anonymous_rss() == 3 << 20


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"memory.max": "1000000\n", "memory.current": "400000\n", "memory.stat": "anon 5\ninactive_file 100000\n"},
            700000,
        ),
        ({"memory.max": "1000\n", "memory.current": "4000\n"}, 0),
        (
            {
                "memory.limit_in_bytes": "1000000",
                "memory.usage_in_bytes": "400000",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 100000\n",
            },
            700000,
        ),
    ],
)
def test_the_control_group_limits_what_is_available(monkeypatch, tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "limit_files", lambda controller: [tmp_path])
    assert available_ram() == expected


@pytest.mark.parametrize("files", [{}, {"memory.max": "max\n", "memory.current": "400000\n"}])
def test_a_group_without_a_limit_does_not(monkeypatch, tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "limit_files", lambda controller: [tmp_path])
    assert available_ram() > 10 << 20


@pytest.mark.parametrize(("machine", "expected"), [(1 << 30, 1 << 30), (1 << 40, 600000)])
def test_of_machine_and_control_group_the_smaller_counts(monkeypatch, tmp_path, machine, expected):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=machine))
    if expected != machine:
        (tmp_path / "memory.max").write_text("1000000\n")
        (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(memory, "limit_files", lambda controller: [tmp_path])
    assert available_ram() == expected


def test_what_does_not_fit_is_refused_before_it_is_begun(monkeypatch):
    monkeypatch.setattr(memory, "available_ram", lambda: 1 << 30)
    memory.require_ram(1 << 30, "this", "do that")
    with pytest.raises(ResourceError) as caught:
        memory.require_ram((1 << 30) + 1, "this", "do that")
    assert caught.value.rule == "ram.guard"
