"""Pools of workers that run tasks. A pool replaces a worker that ends, stops responding or sends an invalid answer."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ingot.cluster import messages
from ingot.cluster.messages import Answer, Beat, InvalidMessageError, WorkerLostError
from ingot.cluster.tasks import TASK_TYPES
from ingot.core.files.system import own_group
from ingot.core.isolation import isolated_command, isolated_environment
from ingot.core.registry import Registry
from ingot.core.runtime.parallel import default_workers
from ingot.errors import INGOT_VERSION, UsageError

_ENDING = 10.0  # seconds that a killed process may take to end


class ProcessWorker:
    """A worker process on this machine and the pipes to it; implements ``Worker``."""

    def __init__(self, interval: float) -> None:
        self.beats = 0
        self.cpu = 0.0
        pipe = subprocess.PIPE
        # A separate process group keeps Ctrl-C from the worker. Closing an unbuffered pipe never blocks.
        try:
            self._process = subprocess.Popen(  # noqa: S603
                isolated_command("ingot.cluster.worker", "serve", str(interval)),
                stdin=pipe,
                stdout=pipe,
                bufsize=0,
                env=isolated_environment(os.environ),
                **own_group(),
            )
        except OSError as error:
            raise WorkerLostError(f"a process cannot be started: {error}") from error
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._receive, name="ingot-answers", daemon=True).start()

    @property
    def name(self) -> str:
        """``process`` and the process id, for error messages."""
        return f"process {self._process.pid}"

    @property
    def pid(self) -> int:
        """The id of the worker process."""
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Write a request to the worker's input by a thread, because a suspended worker does not read."""
        threading.Thread(target=self._write, args=(line + b"\n",), name="ingot-request", daemon=True).start()

    def poll(self, seconds: float) -> bytes | None:
        """Return the worker's next answer; None after a heartbeat, or without an answer within ``seconds``."""
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            return None
        if line is None:
            self._lines.put(None)
            raise WorkerLostError(f"{self.name} ended")
        return line or None

    def kill(self) -> None:
        """End the worker process at once.

        If the process is in a file system call that hangs, the process ends only when the call returns.
        """
        self._process.kill()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[self._process.stdin.write(remaining) or 0 :]
        except (OSError, ValueError):  # the process has ended; ``_receive`` notices the end of its output
            return

    def _receive(self) -> None:
        """Read the worker's output: record heartbeats, and queue every other line."""
        assert self._process.stdout is not None
        with os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as lines:
            self._process.stdout.close()
            while line := lines.readline(messages.LARGEST + 1):
                try:
                    beat = messages.decode(line, Beat) if line.startswith(messages.BEAT) else None
                except InvalidMessageError:
                    beat = None
                if beat is not None:
                    self.cpu = beat.beat
                    self.beats += 1
                self._lines.put(line if beat is None else b"")
        self._lines.put(None)


TIMEOUT = "INGOT_WORKER_TIMEOUT"
"""The environment variable with the number of seconds without a heartbeat after which a worker is replaced."""

_DEFAULT_TIMEOUT = 20.0
_STALLED = 3  # a worker without processor time is replaced after this multiple of the timeout
_LEAST_CPU = 1e-3  # seconds of processor time that count as work
_STARTS = 3  # attempts to start a worker before its task fails
_JOIN = 15.0
_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


class Pool(Protocol):
    """A set of workers, each of which runs one task at a time."""

    @property
    def slots(self) -> int:
        """The number of tasks that can run at the same time at present."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all workers run on this machine, so that files they have just written are in its page cache."""
        ...

    def submit(self, task_type: str, body: Any, check: Callable[[Any], None] | None = None) -> Future[Any]:
        """Run a task of a type in ``TASK_TYPES`` on a worker, and return a future for its result.

        ``check`` receives the result before the future does. It raises ``WorkerLostError`` for an invalid result. The
        future raises this error too, and ``WorkerLostError`` if the worker ends, stops responding or sends an invalid
        answer. Otherwise it raises the error of the task, or the error of sending the task.
        """
        ...

    def close(self) -> None:
        """Stop all workers, even during a task, and wait until they have ended."""
        ...


class Worker(Protocol):
    """The interface of a started worker.

    ``beats`` is the number of heartbeats received, ``cpu`` the processor time in seconds that the last one reported.
    """

    beats: int
    cpu: float

    @property
    def name(self) -> str:
        """The name by which error messages identify the worker."""
        ...

    def send(self, line: bytes) -> None:
        """Send a request without waiting."""
        ...

    def poll(self, seconds: float) -> bytes | None:
        """Return the next answer; None after a heartbeat, or if there is no answer within ``seconds``.

        Raises ``WorkerLostError`` if the worker has ended.
        """
        ...

    def kill(self) -> None:
        """End the worker, and wait for its end for a limited time."""
        ...


def worker_timeout() -> float:
    """Return the number of seconds without a heartbeat after which a worker is replaced.

    Raises ``UsageError`` ``cluster.timeout`` if ``INGOT_WORKER_TIMEOUT`` is not a positive number.
    """
    text = os.environ.get(TIMEOUT) or str(_DEFAULT_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{TIMEOUT} is {text[:40]!r}: set it to a positive number of seconds", rule="cluster.timeout")
    return seconds


@dataclass(frozen=True, slots=True)
class _Job:
    """A submitted task: its request as a line, the type of its result, its check, and its future."""

    id: int
    line: bytes
    result: type[Any]
    check: Callable[[Any], None] | None
    future: Future[Any] = field(default_factory=Future)


class _Watch:
    """Detects a worker that sends no heartbeats or uses no processor time.

    Time during which this process was suspended does not count.
    """

    def __init__(self, worker: Worker, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._beats = worker.beats
        self._cpu = worker.cpu
        self._silent = self._stalled = 0.0

    def check(self, seconds: float) -> None:
        """Raise ``WorkerLostError`` if the worker must be replaced; ``seconds`` have passed since the last call."""
        worker = self._worker
        self._silent = 0.0 if worker.beats != self._beats else self._silent + seconds
        working = abs(worker.cpu - self._cpu) >= _LEAST_CPU
        self._stalled = 0.0 if working else self._stalled + seconds
        self._beats = worker.beats
        if working:
            self._cpu = worker.cpu
        if self._silent >= self._timeout:
            raise WorkerLostError(f"{worker.name} sent no heartbeat for {self._timeout:g} seconds")
        if self._stalled >= _STALLED * self._timeout:
            raise WorkerLostError(f"{worker.name} used no processor time for {_STALLED * self._timeout:g} seconds")


class WorkerPool:
    """A pool that starts workers when tasks are waiting; implements ``Pool``.

    One thread per worker sends it one task after the other. After a worker is lost the thread pauses, so that another
    worker gets the task first, and then starts a new worker.

    Parameters
    ----------
    start : callable
        Starts a worker; its argument is the number of seconds between heartbeats.
    timeout : float
        Seconds without a heartbeat after which a worker is replaced.
    starting : float
        Seconds until the first heartbeat after which a starting worker is replaced.
    """

    is_local = True

    def __init__(self, start: Callable[[float], Worker], timeout: float, starting: float) -> None:
        self._start = start
        self._timeout = timeout
        self._starting = starting
        self._interval = min(1.0, timeout / 10)
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that have no task
        self._workers: set[Worker] = set()
        self._closed = False

    @property
    def slots(self) -> int:
        """The number of tasks that the pool's workers can run at the same time."""
        raise NotImplementedError

    def submit(self, task_type: str, body: Any, check: Callable[[Any], None] | None = None) -> Future[Any]:
        """Queue a task for the next free worker; return a future for its result."""
        try:
            task_id = next(self._ids)
            result_type = TASK_TYPES.get_or_refuse(task_type).result
            line = messages.encode({"id": task_id, "ingot": INGOT_VERSION, "type": task_type, "body": body})
            job = _Job(task_id, line, result_type, check)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        with self._changed:
            if self._closed:
                job.future.set_exception(WorkerLostError("the pool is closed"))
                return job.future
            self._jobs.append(job)
            if len(self._jobs) > self._free and len(self._threads) < self.slots:
                thread = threading.Thread(target=self._serve, name="ingot-worker", daemon=True)
                self._threads.append(thread)
                self._free += 1
                thread.start()
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Cancel waiting tasks, kill all workers, and wait until they have ended."""
        with self._changed:
            self._closed = True
            jobs = list(self._jobs)
            workers = list(self._workers)
            self._jobs.clear()
            self._changed.notify_all()
        for job in jobs:
            job.future.cancel()
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join(_JOIN)
        self._workers.clear()

    def _serve(self) -> None:
        """Run tasks on a worker, and on new workers after it is lost, until the pool closes."""
        worker: Worker | None = None
        losses = 0
        while self._wait_for_job():
            failure: Exception | None = None
            if worker is None:
                try:
                    worker = self._start_with_retries(losses)
                except Exception as error:
                    failure = error
            job = self._take_job()
            if job is None:
                continue
            try:
                result = self._run(worker, failure, job)
            except BaseException as error:
                losses += 1
                self._give_up(worker)
                worker = None
                self._finish(job, error=error)
            else:
                losses = 0
                self._finish(job, result)

    def _wait_for_job(self) -> bool:
        """Wait until a task is waiting; return False if the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return not self._closed

    def _take_job(self) -> _Job | None:
        with self._changed:
            while self._jobs:
                job = self._jobs.popleft()
                if job.future.set_running_or_notify_cancel():
                    self._free -= 1
                    return job
        return None

    def _finish(self, job: _Job, result: Any = None, error: BaseException | None = None) -> None:
        with self._changed:
            self._free += 1
        if isinstance(result, _Failed):
            error = result.error
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)

    def _start_with_retries(self, losses: int) -> Worker:
        """Start a worker and wait for its first heartbeat, with retries.

        ``losses`` is the number of workers that were lost in a row. If it is not 0, pause first.
        """
        for attempt in range(_STARTS):
            self._pause(losses + attempt)
            worker: Worker | None = None
            try:
                worker = self._new_worker()
                self._wait(worker, self._starting, is_start=True)
            except Exception:
                self._give_up(worker)
                if attempt == _STARTS - 1:
                    raise
            else:
                return worker
        raise AssertionError

    def _new_worker(self) -> Worker:
        with self._changed:
            if self._closed:
                raise WorkerLostError("the pool is closed")
            worker = self._start(self._interval)
            self._workers.add(worker)
        return worker

    def _pause(self, losses: int) -> None:
        if losses:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, min(_PAUSE * 2**losses, _LONGEST_PAUSE))

    def _run(self, worker: Worker | None, failure: Exception | None, job: _Job) -> Any:
        """Return the result of a task; if the task raised an error, return it as ``_Failed``.

        Raises ``failure`` if there is no worker, and ``WorkerLostError`` if the worker returns no valid answer.
        """
        if worker is None:
            raise failure or WorkerLostError("no worker has started")
        worker.send(job.line)
        line = self._wait(worker, self._timeout)
        try:
            result = _result_in(line, job)
        except InvalidMessageError as error:
            raise WorkerLostError(f"{worker.name} answered with no valid result: {error}") from error
        if job.check is not None and not isinstance(result, _Failed):
            job.check(result)
        return result

    def _wait(self, worker: Worker, timeout: float, *, is_start: bool = False) -> bytes:
        """Return the next answer of a worker. If ``is_start`` is true, return empty bytes after its first heartbeat.

        Raises ``WorkerLostError`` if the worker stops responding, or if the pool is closed.
        """
        watch = _Watch(worker, timeout)
        while True:
            began = time.monotonic()
            line = worker.poll(self._interval)
            if line is not None or (is_start and worker.beats > 0):
                return line or b""
            if self._closed:
                raise WorkerLostError("the pool is closed")
            watch.check(min(time.monotonic() - began, 2 * self._interval))

    def _give_up(self, worker: Worker | None) -> None:
        if worker is None:
            return
        with suppress(Exception):  # the cluster may have ended together with its workers
            worker.kill()
        with self._changed:
            self._workers.discard(worker)


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error that a task raised and its worker reported; the worker can run further tasks."""

    error: Exception


def _result_in(line: bytes, job: _Job) -> Any:
    """Return the result in the answer ``line``, or the error in it as ``_Failed``.

    Raises ``InvalidMessageError`` if the line is no answer to ``job``.
    """
    answer = messages.decode(line, Answer)
    if answer.id != job.id:
        raise InvalidMessageError(f"expected an answer to task {job.id}, found one to {answer.id}")
    if answer.error is not None:
        return _Failed(messages.decode_error(answer.error))
    return messages.convert(answer.result, job.result)


class Processes(WorkerPool):
    """A pool of processes on this machine.

    Parameters
    ----------
    workers : int, optional
        Number of processes; one per processor by default.

    Raises
    ------
    UsageError
        ``cluster.timeout``.
    """

    def __init__(self, workers: int | None = None) -> None:
        timeout = worker_timeout()
        super().__init__(ProcessWorker, timeout, timeout)
        self._slots = workers or default_workers()

    @property
    def slots(self) -> int:
        """The number of worker processes, each of which runs one task at a time."""
        return self._slots

    @property
    def pids(self) -> list[int]:
        """The ids of the worker processes that are running."""
        with self._changed:
            return [worker.pid for worker in self._workers if isinstance(worker, ProcessWorker)]


def process_pool(address: str | None, threads: int) -> Pool:
    """Return a pool with a process for each processor of this machine."""
    return Processes()


POOLS: Registry[Callable[[str | None, int], Pool]] = Registry(
    "engine",
    (("processes", "ingot.cluster.pool:process_pool"), ("ray", "ingot.cluster.ray:ray_pool")),
)
"""The engines by name: functions that return a pool for an address and a number of threads per task."""


def pool_of(engine: str, address: str | None, threads: int = 1) -> Pool:
    """Return the pool of an engine in ``POOLS``; each task uses ``threads``.

    Raises the errors of ``Processes`` and ``ray.ray_pool``.
    """
    return POOLS[engine](address, threads)
