"""A worker: answers requests, and sends heartbeats from a thread of its own while it works.

As a process it reads requests on standard input and writes answers on standard output (``serve``). Workers of Ray
call ``answer`` themselves.
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
from ingot.cluster.task_types import TASK_TYPES
from ingot.core.files.system import end_with_parent
from ingot.errors import INGOT_VERSION, FormatError, UsageError


def worker_name() -> str:
    """Return the name of this worker in reports: its machine and process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def answer(line: bytes) -> bytes:
    """Return the answer to a line, whatever is in it and whatever the task raises."""
    number: int | None = None
    try:
        request = messages.decode(line, Request)
        number = request.id
        return messages.encode(Answer(number, result=_run(request)))
    except BaseException as error:  # also SystemExit, which would end the worker without an answer
        if isinstance(error, InvalidMessageError):
            error = FormatError("cluster.task", f"expected a task as a driver of this version sends it: {error}")
        return messages.encode(Answer(number, error=messages.encode_error(error, worker_name())))


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
    """Answer the requests on standard input, one after the other, until it ends.

    ``interval``, a text because it is an argument of the process, is the number of seconds between heartbeats.

    The process ends with its input, inside a task too: then the driver is gone. A child of the driver may keep the pipe
    open, and a process that is stopped reads nothing; so the system, and the heartbeat's thread, end it too.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which stops its workers
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    writing = threading.Lock()

    def send(line: bytes) -> None:
        try:
            with writing:
                output.write(line + b"\n")
                output.flush()
        except OSError:  # the driver is gone
            os._exit(1)

    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    threading.Thread(target=_beat, args=(send, float(interval)), daemon=True).start()
    while True:
        send(answer(requests.get()))


def _receive(requests: SimpleQueue[bytes]) -> None:
    """Read lines until the input ends. Requests are parsed by the main thread, so no line can end this one."""
    try:
        with os.fdopen(os.dup(0), "rb") as lines:
            while line := lines.readline(messages.LARGEST + 1):
                requests.put(line)
    finally:
        os._exit(0)


def _beat(send: Callable[[bytes], None], interval: float) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        # Without this thread's own time: a worker whose task waits for ever uses none.
        send(messages.encode(Beat(max(time.process_time() - time.thread_time(), 0.0))))
        time.sleep(interval)
    os._exit(0)
