"""Faults of workers, one suite for both engines: workers that end, stop, hang or answer wrongly; a driver's end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import ingot
from ingot import errors
from ingot.cluster import messages
from ingot.cluster import pool as process
from ingot.cluster.messages import Answer, Beat, Task, WorkerLostError
from ingot.cluster.pool import Processes, WorkerPool
from ingot.cluster.scheduler import run_tasks
from ingot.cluster.tasks import TASK_TYPES
from ingot.cluster.worker import answer
from ingot.core import isolation
from ingot.errors import IngotError

FAULTS = Path(__file__).parent / "fault_modules"
Start = Callable[..., WorkerPool]

without_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make ray")


@pytest.fixture(scope="module", autouse=True)
def _tasks() -> Iterator[None]:
    """Workers, and this process, know the tasks of ``fault_tasks``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
        patch.syspath_prepend(str(FAULTS))
        for name in ("echo", "raise", "exit", "sleep", "hash", "garble"):
            if f"test-{name}" not in TASK_TYPES:
                TASK_TYPES.add(f"test-{name}", f"fault_tasks:{name.upper()}")
        yield


@pytest.fixture(scope="module")
def cluster(_tasks: None) -> Iterator[str]:
    """A Ray cluster of two processors."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield started.address
    started.shutdown()


@pytest.fixture(params=["processes", pytest.param("ray", marks=without_ray)])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a pool of an engine, in which a worker is given up after some seconds; it is closed after the test."""
    pools: list[WorkerPool] = []
    if request.param == "ray":
        address: str = request.getfixturevalue("cluster")

    def started(workers: int = 1, timeout: float = 20) -> WorkerPool:
        monkeypatch.setenv("INGOT_WORKER_TIMEOUT", str(timeout))
        if request.param == "processes":
            pools.append(Processes(workers))
        else:
            import ray

            from ingot.cluster.ray import RayPool

            pools.append(RayPool(ray, address, 2 // workers))
        return pools[-1]

    yield started
    for pool in pools:
        pool.close()


def call(pool: WorkerPool, task: str, **body: Any) -> Any:
    return pool.submit(f"test-{task}", body).result(60)


def pid_of(pool: WorkerPool) -> int:
    pid: int = call(pool, "echo")["pid"]
    return pid


def wait_for_end(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)


def test_values_cross_unchanged(start: Start) -> None:
    value = {"text": "a\udcff\n\u2028", "numbers": [1, 2.5, float("inf")], "none": None, "long": "x" * 300_000}
    assert call(start(), "echo", value=value)["value"] == value


def test_nothing_is_imported_from_the_current_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by an empty entry of PYTHONPATH, which means the current folder."""
    for name in ("numpy", "xxhash", "backports", "msgspec", "psutil", "ml_dtypes", "fault_tasks"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the folder of the data')")
    (tmp_path / "ingot").mkdir()
    (tmp_path / "ingot" / "__init__.py").write_text("raise SystemExit('imported from the folder of the data')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", str(FAULTS)]))
    monkeypatch.chdir(tmp_path)
    facts = call(start(), "echo")
    assert not {"", ".", str(tmp_path), os.path.realpath(tmp_path)} & set(facts["path"])
    assert not Path(facts["numpy"]).is_relative_to(tmp_path)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_is_replaced(start: Start, sign: signal.Signals) -> None:
    """Ray's workers end after a while, when they are told to."""
    pool = start(timeout=2)
    pid = pid_of(pool)
    future = pool.submit("test-sleep", {"seconds": 100})
    while not future.running():
        time.sleep(0.01)
    os.kill(pid, sign)
    with pytest.raises(WorkerLostError, match=r"ended|no heartbeat"):
        future.result(60)
    assert pid_of(pool) != pid


def test_a_worker_that_ends_itself_is_replaced(start: Start) -> None:
    pool = start()
    with pytest.raises(WorkerLostError, match="ended"):
        call(pool, "exit", count=3)
    assert call(pool, "echo", value=1)["value"] == 1


def test_a_stopped_worker_is_given_up_and_its_task_done_by_another(start: Start) -> None:
    pool = start(timeout=2)
    pid = pid_of(pool)
    os.kill(pid, signal.SIGSTOP)
    results: list[int] = []
    run_tasks(
        pool,
        [Task(0, 1, 1)],
        lambda task: pool.submit("test-sleep", {"seconds": 0.1}),
        lambda task, result: results.append(result),
    )
    assert len(results) == 1
    assert results[0] != pid
    wait_for_end(pid)


def test_a_stopped_worker_gets_a_task_that_no_pipe_holds(start: Start) -> None:
    """The driver does not wait for a worker that reads nothing."""
    pool = start(timeout=2)
    os.kill(pid_of(pool), signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="no heartbeat for 2 seconds"):
        call(pool, "echo", value="x" * 2_000_000)


def test_a_worker_that_waits_for_ever_is_given_up(start: Start) -> None:
    """As inside a read of a file system that hangs: heartbeats go on."""
    pool = start(timeout=1)
    pid = pid_of(pool)
    with pytest.raises(WorkerLostError, match="no processor time for 3 seconds"):
        call(pool, "sleep", seconds=300)
    wait_for_end(pid)


@pytest.mark.slow
def test_long_native_work_is_no_stop(start: Start) -> None:
    pool = start(timeout=2)
    assert len(call(pool, "hash", count=10_000_000)) == 64


WRONG = {
    "no JSON": "garbage",
    "empty": "",
    "no object": "[1, 2]",
    "no fields": "{}",
    "other task": '{"id": 1000000, "result": 3}',
    "no task": '{"id": null, "error": {"type": "FormatError", "message": "x"}}',
    "more fields": '{"id": 0, "result": 3, "run": "code"}',
    "wrong type": '{"id": 0, "result": "text"}',
    "wrong error": '{"id": 0, "error": {"type": 3, "message": "x"}}',
    "deep": '{"id": 0, "result": ' + "[" * 100_000,
    "binary": "\udc80\udcff".encode("utf-16", "surrogatepass").decode("latin-1"),
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_noticed_and_the_task_done_by_another(start: Start, line: str, tmp_path: Path) -> None:
    pool, results, lost = start(), list[int](), list[BaseException | None]()

    def submit(task: Task) -> Any:
        future = pool.submit("test-garble", {"line": line, "flag": str(tmp_path / "flag")})
        future.add_done_callback(lambda done: lost.append(done.exception()))
        return future

    run_tasks(pool, [Task(0, 1, 1)], submit, lambda task, result: results.append(result))
    assert [type(error) for error in lost] == [WorkerLostError, type(None)]
    assert results[0] > 0


def test_wrong_answers_of_all_workers_are_an_error(start: Start) -> None:
    pool = start()
    with pytest.raises(IngotError, match="no valid result") as caught:
        run_tasks(pool, [Task(0, 1, 1)], lambda task: pool.submit("test-garble", {"line": "x"}), lambda *_: None)
    assert caught.value.rule == "cluster.lost"


ODD = {
    "unpicklable": (RuntimeError, "ended its task with Unpicklable: of the task"),
    "two arguments": (RuntimeError, "TwoArguments: one and two"),
    "textless": (RuntimeError, "Textless: .no text: ValueError"),
    "group": (RuntimeError, "ExceptionGroup: several"),
    "exit": (RuntimeError, "SystemExit: 7"),
    "interrupt": (RuntimeError, "KeyboardInterrupt"),
    "base": (RuntimeError, "GeneratorExit: odd"),
    "surrogate": (RuntimeError, "\udcff"),
    "memory": (errors.ResourceError, "ran out of memory"),
    "os": (OSError, "No space left on device: '/data/x'"),
    "ingot": (errors.FormatError, r"^there: the message \[test.rule\]$"),
    "derived": (errors.IntegrityError, r"^the message \[test.rule\]$"),
    "extra": (errors.MissingExtraError, r"pip install 'ingot\[more\]'"),
}


def test_every_error_of_a_task_crosses_and_the_worker_lives_on(start: Start) -> None:
    pool = start()
    pid = pid_of(pool)
    for name, (cls, text) in ODD.items():
        with pytest.raises(cls, match=text) as caught:
            call(pool, "raise", name=name)
        assert type(caught.value) is cls, name
    assert pid_of(pool) == pid


def test_what_cannot_be_sent_is_an_error_of_the_future(start: Start) -> None:
    pool = start()
    with pytest.raises(TypeError):
        call(pool, "echo", value=threading_lock())
    with pytest.raises(IngotError, match="unknown task 'test-none'"):
        call(pool, "none")
    assert call(pool, "echo", value=1)["value"] == 1


def threading_lock() -> Any:
    import threading

    return threading.Lock()


def test_a_task_that_breaks_its_schema_is_refused_by_the_worker(start: Start) -> None:
    with pytest.raises(errors.FormatError, match=r"cluster\.task"):
        call(start(), "sleep", seconds="long")


def test_closing_ends_workers_inside_their_tasks(start: Start) -> None:
    pool = start(2)
    pids = [pid_of(pool)]
    futures = [pool.submit("test-sleep", {"seconds": 100}) for _ in range(5)]
    while not futures[0].running():
        time.sleep(0.01)
    pool.close()
    for future in futures:
        assert future.done()
    for pid in pids:
        wait_for_end(pid)
    with pytest.raises(WorkerLostError, match="closed"):
        call(pool, "echo")


def test_a_late_answer_is_of_no_effect(start: Start) -> None:
    """A worker that goes on after it was given up: its task was done by another, and no later task gets its answer."""
    pool = start(timeout=2)
    pid = pid_of(pool)
    future = pool.submit("test-sleep", {"seconds": 3})
    while not future.running():
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerLostError):
        future.result(60)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert [call(pool, "echo", value=number)["value"] for number in range(3)] == [0, 1, 2]


DRIVER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
import sitecustomize
from ingot.cluster.pool import Processes
if sys.argv[1] == "processes":
    pool = Processes(2)
else:
    import ray
    from ingot.cluster.ray import RayPool
    pool = RayPool(ray, sys.argv[1], 1)
first = pool.submit("test-sleep", {"seconds": 0.5})
other = pool.submit("test-sleep", {"seconds": 0.5})
pids = first.result(), other.result()
pool.submit("test-sleep", {"seconds": 1000})
if sys.argv[3] == "fork" and not os.fork():
    time.sleep(1000)  # has the pipes too
print(*pids, flush=True)
time.sleep(1000)
"""


def kill_a_driver(where: str, state: str) -> None:
    """Start a driver with two workers, one of which has a task, kill it, and wait for the workers' end."""
    command = [sys.executable, "-c", DRIVER, where, str(FAULTS), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as driver:
        assert driver.stdout is not None
        pids = [int(text) for text in driver.stdout.readline().split()]
        assert pids
        if state == "stopped":
            os.kill(pids[0], signal.SIGSTOP)
        children = psutil.Process(driver.pid).children()
        driver.kill()
    try:
        for pid in pids:
            wait_for_end(pid)
    finally:
        for child in children:
            if child.is_running():
                child.kill()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_workers_end_with_their_driver(start: Start, request: pytest.FixtureRequest, state: str) -> None:
    is_ray = request.node.callspec.params["start"] == "ray"
    kill_a_driver(request.getfixturevalue("cluster") if is_ray else "processes", state)


# What follows is about processes alone.


def test_workers_end_with_a_driver_whose_child_keeps_their_pipes_open() -> None:
    kill_a_driver("processes", "fork")


REQUEST = {"id": 5, "ingot": ingot.__version__, "type": "test-echo", "body": {}}
MALFORMED = {
    "no JSON": b"garbage",
    "binary": bytes(range(256)),
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "no object": b"[]",
    "no id": b"{}",
    "a text as id": json.dumps({**REQUEST, "id": "5"}).encode(),
    "other fields": json.dumps({**REQUEST, "function": "os.system"}).encode(),
    "unknown type": json.dumps({**REQUEST, "type": "os:system"}).encode(),
    "other version": json.dumps({**REQUEST, "ingot": "0.0.9"}).encode(),
    "wrong body": json.dumps({**REQUEST, "type": "test-sleep", "body": {"seconds": []}}).encode(),
    "deep": b'{"id": 5, "body": ' + b'{"a":' * 100_000,
}


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_answered_with_an_error(line: bytes) -> None:
    answered = messages.decode(answer(line), Answer)
    assert answered.result is None
    assert answered.error is not None
    assert answered.error.rule in ("cluster.task", "cluster.version")


def test_a_worker_process_goes_on_after_malformed_requests() -> None:
    worker = process.ProcessWorker(10)
    try:
        for number, line in enumerate(MALFORMED.values()):
            worker.send(line)
            refused = [messages.decode(next_line(worker), Answer) for _ in range(1 + line.count(b"\n"))]
            assert all(item.error is not None for item in refused)
            worker.send(json.dumps({**REQUEST, "id": number}).encode())
            assert messages.decode(next_line(worker), Answer).id == number
    finally:
        worker.kill()


def next_line(worker: process.ProcessWorker) -> bytes:
    for _ in range(100):
        line = worker.poll(1)
        if line is not None:
            return line
    raise AssertionError("no answer")


def test_what_a_task_prints_is_no_answer() -> None:
    with closing(Processes(1)) as pool:
        assert pool.submit("test-echo", {"value": 1}).result(60)["value"] == 1
        assert len(pool.pids) == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_WORKER_TIMEOUT", text)
    with pytest.raises(IngotError, match="INGOT_WORKER_TIMEOUT") as caught:
        Processes(1)
    assert caught.value.rule == "cluster.timeout"


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_START", "raise SystemExit(1)")
    with closing(Processes(1)) as pool, pytest.raises(WorkerLostError, match="ended"):
        pool.submit("test-echo", {}).result(60)


def test_a_process_that_the_system_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(isolation.sys, "executable", str(tmp_path / "python"))
    with closing(Processes(1)) as pool, pytest.raises(WorkerLostError, match="cannot be started"):
        pool.submit("test-echo", {}).result(60)


def test_a_heartbeat_is_no_answer() -> None:
    line = messages.encode(Beat(1.5))
    assert line.startswith(messages.BEAT)
    assert messages.decode(line, Beat).beat == 1.5
