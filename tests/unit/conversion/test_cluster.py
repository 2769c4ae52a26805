"""Conversions by several workers: the bytes of a local run, whoever is killed meanwhile."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cluster import tasks
from ingot.cluster.messages import WorkerLostError
from ingot.cluster.pool import Processes
from ingot.errors import IngotError
from tests.support.s3 import environment
from tests.support.web import WebServer
from tests.support.workers import Inline

NAMES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six matrices, each a task of its own."""
    rng = np.random.default_rng(5)
    ingot.save(tmp_path / "m.safetensors", {n: rng.standard_normal((64, 128)).astype(np.float32) for n in NAMES})
    monkeypatch.setattr(tasks, "MIN_TASK_BYTES", 1 << 15)
    return tmp_path / "m.safetensors"


def files(path: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in ([path] if path.is_file() else sorted(path.iterdir()))}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("x.zt", {"recipe": "int4"}),  # in their places, one file
        ("x", {"format": "safetensors", "recipe": "bf16", "max_shard": 40_000}),  # several
        ("x.squizd", {"recipe": "int4"}),  # through the driver
    ],
)
def test_the_bytes_are_those_of_a_local_run(
    source: Path, name: str, more: dict[str, Any], hire: Callable[..., None]
) -> None:
    (source.parent / "here").mkdir()
    here = ingot.convert(source, source.parent / "here" / name, **more)
    hire(Inline(lambda count: WorkerLostError("lost") if count in (1, 4) else None))
    events: list[ingot.ProgressEvent] = []
    report = ingot.convert(source, source.parent / name, engine="processes", progress=events.append, **more)
    assert events[-1].processed == events[-1].total
    assert [rate > 0 for rate in events[-1].rates.values()] == [True]
    assert files(source.parent / name) == files(source.parent / "here" / name)
    assert report.tensors == here.tensors
    assert sorted(path.name for path in source.parent.iterdir()) == sorted(["here", "m.safetensors", name])


@pytest.mark.parametrize("recipe", ["bf16", "int4"])
def test_a_tensor_that_is_more_than_a_share_is_done_in_pieces(
    source: Path, recipe: str, hire: Callable[..., None]
) -> None:
    sizes = dict.fromkeys(NAMES, 64) | {NAMES[2]: 2000}
    rng, large = np.random.default_rng(6), source.parent / "large.safetensors"
    ingot.save(large, {name: rng.standard_normal((rows, 128)).astype(np.float32) for name, rows in sizes.items()})
    ingot.convert(large, source.parent / "here.zt", recipe=recipe)
    pool = Inline(slots=4)
    hire(pool)
    ingot.convert(large, source.parent / "x.zt", recipe=recipe, engine="processes")
    assert sum(task.rows is not None for task in pool.tasks) > 4
    assert sum(task.nbytes for task in pool.tasks) == sum(sizes.values()) * 128 * 4
    assert (source.parent / "x.zt").read_bytes() == (source.parent / "here.zt").read_bytes()


def test_a_process_that_is_killed_is_replaced(source: Path, hire: Callable[..., None]) -> None:
    ingot.convert(source, source.parent / "here.zt", recipe="int4")
    pool = Processes(1)
    hire(pool)
    killed = threading.Event()

    def kill(event: ingot.ProgressEvent) -> None:
        if event.processed and not killed.is_set():
            killed.set()
            os.kill(pool.pids[0], signal.SIGKILL)

    ingot.convert(source, source.parent / "x.zt", recipe="int4", engine="processes", progress=kill)
    assert (source.parent / "x.zt").read_bytes() == (source.parent / "here.zt").read_bytes()
    assert killed.is_set()
    assert pool.pids == []


def test_ctrl_c_stops_workers_and_leaves_nothing(source: Path, hire: Callable[..., None]) -> None:
    pool = Processes(1)
    hire(pool)
    pids: list[int] = []

    def interrupt(event: ingot.ProgressEvent) -> None:
        if event.processed and not pids:
            pids.extend(pool.pids)
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        ingot.convert(source, source.parent / "x.zt", recipe="int4", engine="processes", progress=interrupt)
    assert len(pids) == 1
    assert not alive(pids[0])
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


DRIVER = """
import sys
from pathlib import Path
import ingot
from ingot.cluster import pool
from ingot.cluster import tasks

if __name__ == "__main__":
    workers, tasks.MIN_TASK_BYTES = pool.Processes(1), 1 << 15
    pool.Processes = lambda: workers

    def tell(event):
        if event.processed >= 3 << 15:
            print(*workers.pids, flush=True)
            sys.stdin.read()  # until it is killed

    ingot.convert(sys.argv[1], sys.argv[2], recipe="int4", engine="processes", resume=True, progress=tell)
"""


@pytest.mark.slow  # three interpreters start
def test_a_driver_that_is_killed_takes_its_workers_along_and_resumes(source: Path, hire: Callable[..., None]) -> None:
    ingot.convert(source, source.parent / "here.zt", recipe="int4")
    command = [sys.executable, "-c", DRIVER, source, source.parent / "x.zt"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        driver.kill()
    while alive(worker):
        time.sleep(0.01)
    assert not (source.parent / "x.zt").exists()
    pool = Inline()
    hire(pool)
    ingot.convert(source, source.parent / "x.zt", recipe="int4", engine="processes", resume=True)
    assert 0 < len(pool.tasks) <= 3
    assert (source.parent / "x.zt").read_bytes() == (source.parent / "here.zt").read_bytes()


def test_a_task_whose_workers_all_die_ends_the_run(source: Path, hire: Callable[..., None]) -> None:
    pool = Inline(lambda count: WorkerLostError("lost"))
    hire(pool)
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, source.parent / "x.zt", engine="processes")
    assert caught.value.rule == "cluster.lost"
    assert max(Counter(task.start for task in pool.tasks).values()) == 4
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("suffix", [".zt", ".squizd"])
def test_a_driver_that_ends_leaves_what_the_next_one_takes(
    source: Path, suffix: str, hire: Callable[..., None]
) -> None:
    out = source.parent / f"x{suffix}"
    ingot.convert(source, source.parent / f"here{suffix}", recipe="int4")
    second = Inline()
    hire(Inline(lambda count: KeyError() if count == 4 else None), second)
    with pytest.raises(KeyError):
        ingot.convert(source, out, recipe="int4", engine="processes", resume=True)
    assert not out.exists()
    ingot.convert(source, out, recipe="int4", engine="processes", resume=True)
    assert len(second.tasks) == len(NAMES) - 3
    assert out.read_bytes() == (source.parent / f"here{suffix}").read_bytes()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WebServer]:
    pytest.importorskip("obstore")
    with WebServer({}, bucket="bucket") as server:
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
        yield server


def test_shards_of_a_bucket_are_made_by_workers(source: Path, bucket: WebServer, hire: Callable[..., None]) -> None:
    """The driver puts the index alone, has the store copy the shards, and takes over those of a run that ended."""
    more: dict[str, Any] = {"format": "safetensors", "recipe": "bf16", "max_shard": 40_000}
    sizes = dict.fromkeys(NAMES, 64) | {NAMES[3]: 200}  # a file of its own, between tensors of another
    ingot.save(source, {name: np.ones((rows, 128), np.float32) for name, rows in sizes.items()}, overwrite=True)
    ingot.convert(source, source.parent / "here", **more)
    second = Inline()
    hire(Inline(lambda count: KeyError() if count == 3 else None), second)
    with pytest.raises(KeyError):
        ingot.convert(source, "s3://bucket/x", engine="processes", resume=True, **more)
    assert not any(name.startswith("x/") for name in bucket.files)
    ingot.convert(source, "s3://bucket/x", engine="processes", resume=True, **more)
    assert len(second.tasks) == 1
    assert bucket.files == {f"x/{name}": data for name, data in files(source.parent / "here").items()}
    put = [request for request in bucket.log if request.method == "PUT" and request.key.startswith("bucket/x/")]
    assert sum("x-amz-copy-source" in {name.lower() for name in request.headers} for request in put) == 4
    assert len(put) == 5


def test_a_shard_that_was_left_and_is_another_now_is_made_again(
    source: Path, bucket: WebServer, hire: Callable[..., None]
) -> None:
    """Of as many bytes: the store's name of its version tells."""
    more: dict[str, Any] = {"format": "safetensors", "recipe": "bf16", "max_shard": 40_000}
    ingot.convert(source, source.parent / "here", **more)
    second = Inline()
    hire(Inline(lambda count: KeyError() if count == 3 else None), second)
    with pytest.raises(KeyError):
        ingot.convert(source, "s3://bucket/x", engine="processes", resume=True, **more)
    left = sorted(name for name in bucket.files if name.endswith(".safetensors"))
    assert len(left) == 2
    bucket.files[left[0]] = bytes(len(bucket.files[left[0]]))
    ingot.convert(source, "s3://bucket/x", engine="processes", resume=True, **more)
    assert len(second.tasks) == 2
    assert bucket.files == {f"x/{name}": data for name, data in files(source.parent / "here").items()}


def test_bytes_that_were_left_and_are_others_now_are_refused(source: Path, hire: Callable[..., None]) -> None:
    out = source.parent / "x.squizd"
    hire(Inline(lambda count: KeyError() if count == 4 else None), Inline())
    with pytest.raises(KeyError):
        ingot.convert(source, out, recipe="int4", engine="processes", resume=True)
    left = sorted(source.parent.glob(".x.squizd.ingot-partial/parts/*/*.bin"))
    left[2].write_bytes(bytes(left[2].stat().st_size))
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, out, recipe="int4", engine="processes", resume=True)
    assert caught.value.rule == "cluster.part"


@pytest.mark.parametrize("more", [{"engine": "fog"}, {"engine": "processes", "address": "ray://host"}])
def test_an_unknown_engine_is_refused(source: Path, more: dict[str, Any]) -> None:
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, source.parent / "x.zt", **more)
    assert caught.value.rule == "cluster.engine"
