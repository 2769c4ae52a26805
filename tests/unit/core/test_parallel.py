"""Bounded threads: order, bounds, clean ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.runtime import memory as cgroup
from ingot.core.runtime import parallel
from ingot.core.runtime.parallel import default_workers, for_ranges, ordered, ordered_together
from ingot.errors import UsageError


def ingot_threads() -> list[str]:
    """Those of `ordered`: others that tests of stores left in the process have longer names."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ingot_")]


@settings(max_examples=30)
@given(st.lists(st.integers(), max_size=40), st.integers(0, 4), st.none() | st.integers(1, 9))
def test_results_come_in_order(items, workers, window):
    assert list(ordered(lambda item: item * 2, items, workers, window)) == [item * 2 for item in items]
    assert ingot_threads() == []


@pytest.mark.parametrize(("workers", "window"), [(0, 5), (1, 1), (1, 3), (3, 4), (4, 2)])
def test_no_more_than_the_window_is_in_flight(workers, window):
    alive, most, taken = 0, 0, 0
    guard = threading.Lock()

    def items():
        nonlocal taken, alive, most
        for item in range(50):
            taken += 1
            with guard:
                alive += 1
                most = max(most, alive)
            yield item

    for count, _ in enumerate(ordered(lambda item: time.sleep(0.0005 * (item % 3)), items(), workers, window), 1):
        assert taken <= count + window
        with guard:
            alive -= 1
    assert most <= max(window, 1)


def test_workers_run_side_by_side():
    barrier = threading.Barrier(3, timeout=30)
    assert len(list(ordered(lambda _: barrier.wait(), range(3), workers=3))) == 3


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_exception_ends_it_without_a_thread_left(workers):
    begun = []

    def work(item):
        begun.append(item)
        if item == 3:
            raise ZeroDivisionError
        return item

    results = []
    with pytest.raises(ZeroDivisionError):
        results.extend(ordered(work, range(1000), workers, window=4))
    assert results in ([0, 1, 2], [])  # extend takes nothing back of what it got
    assert len(begun) < 20
    assert ingot_threads() == []


def test_an_exception_of_the_items_ends_it():
    def items():
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(ordered(str, items(), workers=2))
    assert ingot_threads() == []


def test_a_caller_that_stops_early_leaves_no_thread():
    results = ordered(lambda item: item, range(10**9), workers=2)
    assert next(results) == 0
    results.close()
    assert ingot_threads() == []


@given(st.lists(st.sampled_from([0, 1, 1 << 10, 1 << 20])), st.integers(0, 3))
def test_light_items_and_heavy_ones_come_in_order(weights, workers):
    def work(item):
        return item, threading.get_ident()

    items = list(enumerate(weights))
    found = list(ordered_together(work, items, lambda item: item[1], workers))
    assert [item for item, _ in found] == items


def test_light_items_are_done_here_and_heavy_ones_by_threads():
    """Two heavy items meet at a barrier, so two threads have them; light ones are the calling thread's."""
    barrier = threading.Barrier(2)

    def heavy(item):
        barrier.wait(30)
        return item

    assert list(ordered_together(heavy, range(2), lambda _: 1 << 20, 2)) == [0, 1]
    light = set(ordered_together(lambda _: threading.get_ident(), range(500), lambda _: 1, 2))
    assert light == {threading.get_ident()}


@pytest.mark.parametrize(("workers", "window"), [(-1, None), (2, 0)])
def test_nonsense_is_refused(workers, window):
    with pytest.raises(UsageError):
        list(ordered(str, [1], workers, window))


def test_ctrl_c_ends_the_process_promptly():
    code = (
        "import sys, time\n"
        "from ingot.core.runtime.parallel import ordered\n"
        "try:\n"
        "    for index, _ in enumerate(ordered(lambda item: time.sleep(0.05), range(10**6), 2)):\n"
        "        if index == 2:\n            print('ready', flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    import threading\n"
        "    print(threading.active_count())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert out.strip() == "1"
    assert process.returncode == 0


@given(st.integers(0, 500), st.integers(1, 100), st.integers(0, 3))
@settings(max_examples=40)
def test_ranges_cover_everything_once(count, step, workers):
    seen = [0] * count
    guard = threading.Lock()

    def work(start, stop):
        assert 0 < stop - start <= step
        with guard:
            for index in range(start, stop):
                seen[index] += 1

    for_ranges(count, step, work, workers)
    assert seen == [1] * count


def test_ranges_need_a_step():
    with pytest.raises(UsageError):
        for_ranges(10, 0, lambda start, stop: None)


def test_a_failing_range_is_raised():
    def work(start, stop):
        if start >= 50:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        for_ranges(100, 10, work, 2)


class TestDefaultWorkers:
    @pytest.mark.parametrize(("value", "expected"), [("3", 3), ("5,2", 5), (" 7 ", 7)])
    def test_the_openmp_variable_counts(self, monkeypatch, value, expected):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert default_workers() == expected

    @pytest.mark.parametrize("value", ["", "0", "-2", "many", "1.5"])
    def test_nonsense_in_it_does_not(self, monkeypatch, value):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        plain = default_workers()
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert default_workers() == plain

    def test_affinity_counts(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(parallel, "limit_files", lambda controller: [])
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
        assert default_workers() == 5

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"cpu.max": "150000 100000\n"}, 2),
            ({"cpu.max": "max 100000\n"}, 5),
            ({"cpu.max": "1000 100000\n"}, 1),
            ({"cpu.max": "nonsense"}, 5),
            ({"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}, 3),
            ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 5),
            ({}, 5),
        ],
    )
    def test_the_quota_of_the_control_group_counts(self, monkeypatch, tmp_path, files, expected):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
        monkeypatch.setattr(parallel, "limit_files", lambda controller: [tmp_path])
        assert default_workers() == expected


class TestControlGroups:
    def folders(self, monkeypatch, tmp_path, membership, existing, controller):
        root = tmp_path / "cgroup"
        for name in existing:
            (root / name).mkdir(parents=True)
        (tmp_path / "membership").write_text(membership)
        monkeypatch.setattr(cgroup, "ROOT", root)
        monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
        return [str(folder.relative_to(root)) for folder in cgroup.limit_files(controller)]

    def test_version_2_walks_up_to_the_root(self, monkeypatch, tmp_path):
        found = self.folders(monkeypatch, tmp_path, "0::/user/a\n", ["user/a"], "memory")
        assert found == ["user/a", "user", "."]

    def test_a_container_that_does_not_see_its_group(self, monkeypatch, tmp_path):
        assert self.folders(monkeypatch, tmp_path, "0::/docker/123\n", ["."], "memory") == ["."]

    def test_version_1_has_a_folder_per_controller(self, monkeypatch, tmp_path):
        membership = "4:cpu,cpuacct:/x\n5:memory:/x\n1:name=systemd:/y\n"
        found = self.folders(monkeypatch, tmp_path, membership, ["cpu,cpuacct/x", "memory/x"], "cpu")
        assert found == ["cpu,cpuacct/x", "cpu,cpuacct"]

    def test_no_table_no_folders(self, monkeypatch, tmp_path):
        monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "none")
        assert list(cgroup.limit_files("cpu")) == []
