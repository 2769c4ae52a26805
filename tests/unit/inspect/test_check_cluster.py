"""``verify`` and ``compare`` by several workers: the report of one process, whoever is killed meanwhile."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.cluster import tasks, worker
from ingot.cluster.messages import Task, WorkerLostError
from ingot.cluster.pool import Processes
from ingot.cluster.scheduler import run_tasks
from ingot.errors import IngotError
from tests.support.workers import Inline

NAMES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6)]
Check = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files that differ in values, names and shapes, each tensor a task; two tensors of a third are damaged."""
    rng = np.random.default_rng(5)
    weights = {name: rng.standard_normal((64, 128)).astype(np.float32) for name in NAMES}
    ingot.save(tmp_path / "a.zt", {**weights, "gone": weights[NAMES[0]]})
    (tmp_path / "plain").mkdir()
    ingot.save(tmp_path / "plain" / "m.safetensors", {**weights, NAMES[1]: weights[NAMES[1]].T.copy()})
    ingot.convert(tmp_path / "plain" / "m.safetensors", tmp_path / "b.zt", recipe="int4")
    damage(tmp_path / "b.zt", tmp_path / "damaged.zt", NAMES[2], NAMES[4])
    monkeypatch.setattr(tasks, "MIN_TASK_BYTES", 1 << 10)
    return tmp_path


def damage(path: Path, out: Path, *names: str) -> None:
    """Change a byte of these tensors."""
    data = bytearray(path.read_bytes())
    with ingot.open(path) as checkpoint:
        for name in names:
            data[next(iter(checkpoint[name].parts.values())).offset + 5] ^= 1
    out.write_bytes(data)


def verify(folder: Path, **more: Any) -> Any:
    return ingot.verify(folder / "damaged.zt", **more)


def compare(folder: Path, **more: Any) -> Any:
    return ingot.compare(folder / "a.zt", folder / "b.zt", **more)


def first_error(folder: Path, **more: Any) -> Any:
    """Compare with a file of which two tensors are damaged: the error of the first of them."""
    with pytest.raises(IngotError) as caught:
        ingot.compare(folder / "a.zt", folder / "damaged.zt", **more)
    return caught.value.rule, str(caught.value)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("check", [verify, compare, first_error])
def test_the_report_is_that_of_one_process(
    folder: Path, check: Check, slots: int, hire: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many workers there are, some are lost, and the path is one of this process's folder."""
    monkeypatch.chdir(folder)
    here = check(Path())
    pool = Inline(lambda count: WorkerLostError("lost") if count in (1, 4) else None, slots)
    hire(pool)
    events: list[ingot.ProgressEvent] = []
    assert check(Path(), engine="processes", progress=events.append) == here
    assert len(pool.tasks) > 4
    if check is not first_error:
        assert len(pool.tasks) == 6 + 2
        done: list[ingot.ProgressEvent] = []
        check(Path(), progress=done.append)
        assert (events[-1].processed, events[-1].total) == (done[-1].processed, done[-1].total)
        assert len(events[-1].rates) == 1


def test_what_is_damaged_is_in_the_reports(folder: Path, hire: Callable[..., None]) -> None:
    """So that equal reports are not equal by saying nothing."""
    hire(Inline(), Inline())
    wrong = [item for item in verify(folder, engine="processes") if item.level == "error"]
    assert {name for name in NAMES for item in wrong if name in item.where} == {NAMES[2], NAMES[4]}
    report = compare(folder, engine="processes")
    assert {item.status for item in report.tensors} == {"differs", "only in A", "shape differs"}
    assert NAMES[2] in first_error(folder)[1]


def test_a_process_that_is_killed_is_replaced(folder: Path, hire: Callable[..., None]) -> None:
    pool, killed = Processes(1), list[int]()
    hire(pool)

    def kill(event: ingot.ProgressEvent) -> None:
        if event.processed and not killed:
            killed.extend(pool.pids)
            os.kill(killed[0], signal.SIGKILL)

    assert compare(folder, engine="processes", progress=kill) == compare(folder)
    assert len(killed) == 1
    assert pool.pids == []


def test_ctrl_c_stops_workers(folder: Path, hire: Callable[..., None]) -> None:
    pool, pids = Processes(1), list[int]()
    hire(pool)

    def interrupt(event: ingot.ProgressEvent) -> None:
        if event.processed and not pids:
            pids.extend(pool.pids)
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        verify(folder, engine="processes", progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_error_is_that_of_the_first_task_that_has_one() -> None:
    """Also where a later one ends before."""
    every = [Task(number, number + 1, 0) for number in range(4)]
    futures = {task: Future[None]() for task in every}
    futures[every[2]].set_exception(KeyError("later"))
    futures[every[0]].set_result(None)

    def submit(task: Task) -> Future[None]:
        assert task is not every[3], "it comes after what has failed"
        return futures[task]

    late = threading.Timer(0.05, futures[every[1]].set_exception, [ValueError("earlier")])
    late.start()
    with pytest.raises(ValueError, match="earlier"):
        run_tasks(Inline(), every, submit, lambda task, found: None)
    late.join()


def test_workers_that_find_another_file_are_refused(folder: Path, hire: Callable[..., None]) -> None:
    def replace_file(count: int) -> None:
        (folder / "b.zt").write_bytes((folder / "damaged.zt").read_bytes())

    hire(Inline(replace_file))
    with pytest.raises(IngotError) as caught:
        compare(folder, engine="processes")
    assert caught.value.rule == "cluster.source"


def test_workers_of_another_version_are_refused(
    folder: Path, hire: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "INGOT_VERSION", "0.0.9")
    hire(Inline())
    with pytest.raises(IngotError) as caught:
        verify(folder, engine="processes")
    assert caught.value.rule == "cluster.version"


@pytest.mark.parametrize("check", [verify, compare])
@pytest.mark.parametrize("more", [{"engine": "fog"}, {"engine": "processes", "address": "ray://host"}])
def test_an_unknown_engine_is_refused(folder: Path, check: Check, more: dict[str, Any]) -> None:
    with pytest.raises(IngotError) as caught:
        check(folder, **more)
    assert caught.value.rule == "cluster.engine"


def test_the_command_line(folder: Path, hire: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(folder / "a.zt"), str(folder / "b.zt")
    hire(Inline(), Inline())
    for arguments in (["verify", b], ["compare", a, b, "--json"]):
        code, here = run(arguments), capsys.readouterr().out
        assert (run([*arguments, "--engine", "processes"]), capsys.readouterr().out) == (code, here)
