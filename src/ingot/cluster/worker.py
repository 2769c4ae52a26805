"""A worker: it answers requests, and a separate thread sends heartbeats.

A worker process reads requests from standard input and writes answers to standard output (``serve``). Workers of Ray
call ``answer``.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ingot.cluster import messages
from ingot.cluster.messages import Answer, Beat, InvalidMessageError, Request
from ingot.cluster.tasks import TASK_TYPES
from ingot.core.files.system import end_with_parent
from ingot.errors import INGOT_VERSION, FormatError, UsageError


def worker_name() -> str:
    """Return the name of this worker for reports: host name and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def answer(line: bytes) -> bytes:
    """Run the request in a line, and return the answer. Errors of the task and of the request become an answer."""
    request_id: int | None = None
    try:
        request = messages.decode(line, Request)
        request_id = request.id
        return messages.encode(Answer(request_id, result=_run(request)))
    except BaseException as error:  # also SystemExit, which would end the worker without an answer
        if isinstance(error, InvalidMessageError):
            error = FormatError("cluster.task", f"this is no valid task of a driver of this version: {error}")
        return messages.encode(Answer(request_id, error=messages.encode_error(error, worker_name())))


def _run(request: Request) -> object:
    if request.ingot != INGOT_VERSION:
        raise UsageError(
            f"the driver has Ingot {request.ingot[:40]}, this worker {INGOT_VERSION}: install the same version",
            rule="cluster.version",
            where=worker_name(),
        )
    if request.type not in TASK_TYPES:
        raise InvalidMessageError(f"unknown task {request.type[:40]!r}")
    task_type = TASK_TYPES[request.type]
    return task_type.run(messages.convert(request.body, task_type.body))


def serve(interval: str) -> None:
    """Answer the requests on standard input, one after the other, until the input ends.

    ``interval`` is the number of seconds between heartbeats, as text because it is a command line argument.

    The input ends when the driver ends; this process then ends too, even during a task. If the input does not end,
    because a child of the driver keeps the pipe open, the system or the heartbeat thread ends this process.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and stops its workers
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirect prints of libraries to standard error
    lock = threading.Lock()

    def send(line: bytes) -> None:
        try:
            with lock:
                output.write(line + b"\n")
                output.flush()
        except OSError:  # the driver has ended
            os._exit(1)

    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    threading.Thread(target=_beat, args=(send, float(interval)), daemon=True).start()
    while True:
        send(answer(requests.get()))


def _receive(requests: SimpleQueue[bytes]) -> None:
    """Queue the lines of standard input until it ends, then end the process.

    The main thread parses them, so that an invalid line cannot end this thread.
    """
    try:
        with os.fdopen(os.dup(0), "rb") as lines:
            while line := lines.readline(messages.LARGEST + 1):
                requests.put(line)
    finally:
        os._exit(0)


def _beat(send: Callable[[bytes], None], interval: float) -> None:
    """Send heartbeats until the parent process changes."""
    parent = os.getppid()
    while os.getppid() == parent:
        # Without the time of this thread, so that a worker whose task hangs reports no progress.
        send(messages.encode(Beat(max(time.process_time() - time.thread_time(), 0.0))))
        time.sleep(interval)
    os._exit(0)
