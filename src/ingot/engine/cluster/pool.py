"""Who runs tasks: a pool of workers, here of processes of this machine."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ingot.core.parallel import default_workers
from ingot.core.system import own_group

R = TypeVar("R")


class WorkerLost(Exception):  # noqa: N818 - what happened, not what is wrong with the task
    """The worker that had a task ended before it was done."""


class Pool(Protocol):
    """Workers: each runs one function of a module at a time, whose arguments and result can be pickled.

    ``lost`` are the errors of a future whose worker ended before its task: it is worth another try.
    """

    lost: tuple[type[BaseException], ...]

    @property
    def slots(self) -> int:
        """How many tasks run at a time, now."""
        ...

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Have a worker call ``function(*arguments)``."""
        ...

    def close(self) -> None:
        """Stop all workers, in the middle of their tasks too, and wait until they are gone."""
        ...


class Processes:
    """Processes of this machine, which are started when they are needed first. A ``Pool``.

    Parameters
    ----------
    workers : int, optional
        Processes; one per processor by default.
    """

    lost: tuple[type[BaseException], ...] = (WorkerLost,)

    def __init__(self, workers: int | None = None) -> None:
        self.slots = workers or default_workers()
        self._threads = ThreadPoolExecutor(self.slots, "ingot-worker")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        with self._lock:
            return [process.pid for process in self._running]

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """As ``Pool.submit``."""
        return self._threads.submit(self._call, function, arguments)

    def close(self) -> None:
        """As ``Pool.close``."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in list(self._running):
            self._forget(process)

    def _call(self, function: Callable[..., R], arguments: tuple[Any, ...]) -> R:
        """Have this thread's process call a function."""
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, arguments), process.stdin)
            process.stdin.flush()
            good, result = pickle.load(process.stdout)  # noqa: S301 - of a process of our own
        except BaseException as error:  # whatever it is: what goes in and comes out is not in step any more
            self._own.process = None
            self._forget(process)
            if isinstance(error, (EOFError, OSError, pickle.UnpicklingError)):
                raise WorkerLost(f"process {process.pid} ended") from error
            raise
        if good:
            return result  # type: ignore[no-any-return]
        raise result

    def _start(self) -> subprocess.Popen[bytes]:
        # Not multiprocessing, which would run the user's main module once more in each of them.
        with self._lock:
            if self._closed:
                raise WorkerLost("the pool is closed")
            command = [sys.executable, "-m", "ingot.engine.cluster.pool"]
            pipe = subprocess.PIPE
            # In a group of its own: Ctrl-C is for who handed out the tasks, and stops their workers.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **own_group())  # noqa: S603
            self._running.add(process)
        return process

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # a part of a task was waiting
                    continue
        process.wait()


def pool_of(engine: str, address: str | None, threads: int = 1) -> Pool:
    """Start, or connect to, the workers of the engine ``processes`` or ``ray``.

    A task takes so many ``threads``. Errors as ``RayPool``.
    """
    if engine == "processes":
        return Processes()
    from ingot.engine.cluster.ray import RayPool  # noqa: PLC0415 - it imports this

    return RayPool(address, threads)


def worker_name() -> str:
    """Return what a worker is called in reports: its machine and process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Return whether a function did its work, and what it returned or raised: an error that can be pickled."""
    try:
        return True, function(*arguments)
    except Exception as error:
        return False, _portable(error)


def _portable(error: Exception) -> Exception:
    """Return an error that another process can read: itself, or one that tells of it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made just now
    except Exception:
        return RuntimeError(f"a worker, {worker_name()}, ended with {type(error).__name__}: {str(error)[:2000]}")
    return error


def packed_answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return an ``answer`` as bytes; of a result that cannot be pickled the error that says so."""
    found = answer(function, arguments)
    try:
        return pickle.dumps(found)
    except Exception as error:
        return pickle.dumps((False, _portable(error)))


def serve() -> None:
    """Call functions that come on standard input; what they return goes to standard output.

    When the input ends the process does, inside of a task too: whoever wants its result is gone.
    """
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no result
    waiting: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
    threading.Thread(target=_receive, args=(waiting,), daemon=True).start()
    while True:
        results.write(packed_answer(*waiting.get()))
        results.flush()


def _receive(waiting: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    with os.fdopen(os.dup(0), "rb") as tasks:
        while True:
            try:
                waiting.put(pickle.load(tasks))  # noqa: S301 - of the process that started this one
            except EOFError:
                os._exit(0)


if __name__ == "__main__":
    serve()
