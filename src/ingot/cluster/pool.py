"""Workers that run tasks, and what watches over them: a worker that ends, stops or answers wrongly is given up."""

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
    """A process and its pipes. A ``Worker``."""

    def __init__(self, interval: float) -> None:
        self.beats = 0
        self.cpu = 0.0
        pipe = subprocess.PIPE
        # A group of its own keeps Ctrl-C at the terminal from the worker. Closing an unbuffered pipe never waits.
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
        """As ``Worker.name``."""
        return f"process {self._process.pid}"

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def send(self, line: bytes) -> None:
        """As ``Worker.send``: in a thread, because a worker that is stopped reads nothing."""
        threading.Thread(target=self._write, args=(line + b"\n",), name="ingot-request", daemon=True).start()

    def poll(self, seconds: float) -> bytes | None:
        """As ``Worker.poll``."""
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            return None
        if line is None:
            self._lines.put(None)
            raise WorkerLostError(f"{self.name} ended")
        return line or None

    def kill(self) -> None:
        """As ``Worker.kill``. A process inside a call to a file system that hangs ends when the call does."""
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
        except (OSError, ValueError):  # it ended, or was killed: so does its output
            return

    def _receive(self) -> None:
        """Take heartbeats, and queue every other line."""
        assert self._process.stdout is not None
        with os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as lines:
            self._process.stdout.close()
            while line := lines.readline(messages.LARGEST + 1):
                try:
                    beat = messages.decode(line, Beat) if line.startswith(messages.BEAT) else None
                except InvalidMessageError:
                    beat = None
                if beat is not None:
                    self.cpu, self.beats = beat.beat, self.beats + 1
                self._lines.put(line if beat is None else b"")
        self._lines.put(None)


TIMEOUT = "INGOT_WORKER_TIMEOUT"
"""The environment variable that sets after how many seconds without a heartbeat a worker is given up."""

_DEFAULT_TIMEOUT = 20.0
_STALLED = 3  # times the timeout: a worker that sends heartbeats and uses no processor time is given up
_LEAST_CPU = 1e-3  # seconds of processor time that count as work
_STARTS = 3  # how often a worker is started before a task fails for it
_JOIN = 15.0
_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


class Pool(Protocol):
    """Workers, each of which runs one task at a time."""

    @property
    def slots(self) -> int:
        """The number of tasks that can run at a time, now."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether all workers run on this machine, so that it has in its memory what they have just written."""
        ...

    def submit(self, task_type: str, body: Any, check: Callable[[Any], None] | None = None) -> Future[Any]:
        """Have a worker run a task of a type in ``TASK_TYPES``.

        ``check`` gets the result before the future does, and raises ``WorkerLostError`` if the worker cannot have done
        the task. The future raises that error too if the worker ends, stops or answers wrongly, and else what the task
        raised. What cannot be sent is an error of the future, not of the call.
        """
        ...

    def close(self) -> None:
        """Stop all workers, inside their tasks too, and wait until they have ended."""
        ...


class Worker(Protocol):
    """A started worker. ``beats`` counts its heartbeats, ``cpu`` is the processor time that the last one states."""

    beats: int
    cpu: float

    @property
    def name(self) -> str:
        """What messages call the worker."""
        ...

    def send(self, line: bytes) -> None:
        """Send a request without waiting."""
        ...

    def poll(self, seconds: float) -> bytes | None:
        """Return the next answer; None for a heartbeat, and after ``seconds``.

        Raises ``WorkerLostError`` if the worker has ended.
        """
        ...

    def kill(self) -> None:
        """End the worker, and wait for its end as far as that is possible."""
        ...


def worker_timeout() -> float:
    """Return the seconds without a heartbeat after which a worker is given up.

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
    """A task on its way, as the line that is sent."""

    id: int
    line: bytes
    result: type[Any]
    check: Callable[[Any], None] | None
    future: Future[Any] = field(default_factory=Future)


class _Watch:
    """Notices that a worker has stopped, or waits for something that does not come.

    Time counts only as far as this process was awake to see it: one that was suspended does not blame its workers.
    """

    def __init__(self, worker: Worker, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._beats = worker.beats
        self._cpu = worker.cpu
        self._silent = self._stalled = 0.0

    def check(self, seconds: float) -> None:
        """Look at the worker after ``seconds``; raises ``WorkerLostError``."""
        worker = self._worker
        self._silent = 0.0 if worker.beats != self._beats else self._silent + seconds
        working = abs(worker.cpu - self._cpu) >= _LEAST_CPU
        self._stalled = 0.0 if working else self._stalled + seconds
        self._beats, self._cpu = worker.beats, worker.cpu if working else self._cpu
        if self._silent >= self._timeout:
            raise WorkerLostError(f"{worker.name} sent no heartbeat for {self._timeout:g} seconds")
        if self._stalled >= _STALLED * self._timeout:
            raise WorkerLostError(f"{worker.name} used no processor time for {_STALLED * self._timeout:g} seconds")


class WorkerPool:
    """Workers that are started when tasks wait. A ``Pool``.

    A thread per worker hands it one task after the other. After a worker is lost the thread waits a moment, so that
    another worker gets the task first, and starts a new one.

    Parameters
    ----------
    start : callable
        Starts a worker; gets the seconds between its heartbeats.
    timeout : float
        Seconds without a heartbeat after which a worker is given up.
    starting : float
        Seconds that a worker may take until its first heartbeat.
    """

    is_local = True

    def __init__(self, start: Callable[[float], Worker], timeout: float, starting: float) -> None:
        self._start = start
        self._timeout = timeout
        self._starting = starting
        self._interval = min(1.0, timeout / 10)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that have no task
        self._workers: set[Worker] = set()
        self._closed = False

    @property
    def slots(self) -> int:
        """As ``Pool.slots``."""
        raise NotImplementedError

    def submit(self, task_type: str, body: Any, check: Callable[[Any], None] | None = None) -> Future[Any]:
        """As ``Pool.submit``."""
        try:
            number, result = next(self._numbers), TASK_TYPES.get_or_refuse(task_type).result
            line = messages.encode({"id": number, "ingot": INGOT_VERSION, "type": task_type, "body": body})
            job = _Job(number, line, result, check)
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
        """As ``Pool.close``."""
        with self._changed:
            self._closed = True
            jobs, workers = list(self._jobs), list(self._workers)
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
        """Run tasks on one worker, and on others after it, until the pool closes."""
        worker: Worker | None = None
        losses = 0
        while self._wait_for_job():
            failure: Exception | None = None
            if worker is None:
                try:
                    worker = self._started(losses)
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
        """Wait until there is a task; return False if the pool is closed."""
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

    def _started(self, losses: int) -> Worker:
        """Start a worker and wait for its first heartbeat; after ``losses`` of others, only after a pause."""
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
        """Return the result of a task, or the task's own error as ``_Failed``; raises ``WorkerLostError``."""
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
        """Return the next answer of a worker, or nothing for its first heartbeat at the start.

        Raises ``WorkerLostError``.
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
        with suppress(Exception):  # of a cluster that is gone: its workers are too
            worker.kill()
        with self._changed:
            self._workers.discard(worker)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A task's own error: the worker is well."""

    error: Exception


def _result_in(line: bytes, job: _Job) -> Any:
    """Return the result, or the error, that an answer states; raises ``InvalidMessageError``."""
    answer = messages.decode(line, Answer)
    if answer.id != job.id:
        raise InvalidMessageError(f"expected an answer to task {job.id}, found one to {answer.id}")
    if answer.error is not None:
        return _Failed(messages.decode_error(answer.error))
    return messages.convert(answer.result, job.result)


class Processes(WorkerPool):
    """Processes of this machine. A ``Pool``.

    Parameters
    ----------
    workers : int, optional
        Processes; one per processor by default.

    Raises ``UsageError`` ``cluster.timeout``.
    """

    def __init__(self, workers: int | None = None) -> None:
        timeout = worker_timeout()
        super().__init__(ProcessWorker, timeout, timeout)
        self._slots = workers or default_workers()

    @property
    def slots(self) -> int:
        """As ``Pool.slots``."""
        return self._slots

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        with self._changed:
            return [worker.pid for worker in self._workers if isinstance(worker, ProcessWorker)]


def process_pool(address: str | None, threads: int) -> Pool:
    """Return a worker for each processor of this machine."""
    return Processes()


POOLS: Registry[Callable[[str | None, int], Pool]] = Registry(
    "engine",
    (("processes", "ingot.cluster.pool:process_pool"), ("ray", "ingot.cluster.ray:ray_pool")),
)
"""Name of an engine to the function that returns its workers for an address and a number of threads."""


def pool_of(engine: str, address: str | None, threads: int = 1) -> Pool:
    """Return the workers of an engine of ``POOLS``; each task takes ``threads``.

    Raises the errors of ``Processes`` and ``ray.ray_pool``.
    """
    return POOLS[engine](address, threads)
