"""Workers of a Ray cluster; this is the only module that knows Ray."""

from __future__ import annotations

import logging
import math
import os
import socket
import tempfile
import threading
import time
import warnings
from typing import Any

from ingot.cluster import messages
from ingot.cluster.messages import Beat, InvalidMessageError, WorkerLostError
from ingot.cluster.pool import Pool, Processes, WorkerPool, worker_timeout
from ingot.cluster.worker import answer
from ingot.core.border import require
from ingot.core.runtime.parallel import default_workers
from ingot.errors import IngotError, ResourceError
from ingot.stores.local import LocalStore

WAIT = 10.0
"""Seconds for a connection, and for the first answer to it."""

# How a connection of HTTP/2, which Ray's servers speak, begins, and empty settings (RFC 9113, 3.4 and 6.5).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HEAD = 9
_SETTINGS = 4

_CURRENT = "ray/ray_current_cluster"
_LARGEST = 1 << 12
_AUTO = "auto"
_NONE = ("", "local")


def require_cluster(address: str | None) -> bool:
    """Return whether a cluster is named, and connect to it to see that it is one.

    Parameters
    ----------
    address : str, optional
        As ``ray.init`` takes it: host and port, ``ray://`` before them, ``auto``, ``local``. By default, and for
        ``auto``, the address of ``RAY_ADDRESS``, or of the file that ``ray start`` leaves.

    Raises
    ------
    ResourceError
        ``cluster.address``: nothing answers there within ``WAIT`` seconds, or not in HTTP/2; ``auto`` finds no address.
    """
    named, origin = _named(address)
    if named in _NONE:
        if address == _AUTO:
            raise refusal("found no address", address)
        return False
    target = _host_and_port(named)
    if target is None:  # an address of a scheme that only Ray can read
        return True
    try:
        with socket.create_connection(target, WAIT) as connection:
            speaks = os.environ.get("RAY_USE_TLS", "0") not in ("", "0") or _speaks(connection)
    except OSError as error:
        raise refusal(f"found none ({error})", named, origin) from error
    if not speaks:
        raise refusal("found something else", named, origin)
    return True


def refusal(reason: str, address: str | None, origin: str = "") -> ResourceError:
    """Return the error for an address without a cluster."""
    return ResourceError(
        f"expected a Ray cluster that answers{origin}, {reason}: start one by `ray start`, or give its --address",
        rule="cluster.address",
        where=address,
    )


def _named(address: str | None) -> tuple[str, str]:
    """Return the address that Ray takes, and words for its origin; nothing if Ray would start a cluster."""
    if address not in (None, "", _AUTO):
        return str(address), ""
    if variable := os.environ.get("RAY_ADDRESS", ""):
        return variable, ", as RAY_ADDRESS says"
    folder = LocalStore(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "pread")  # noqa: S108 - as Ray
    try:
        text = folder.read(_CURRENT, _LARGEST, "cluster.address").decode()
    except (IngotError, UnicodeDecodeError):
        return "", ""
    return text.strip(), f", as {folder.location_of(_CURRENT)} says (`ray stop` removes it)"


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def _speaks(connection: socket.socket) -> bool:
    """Whether the other side answers with the settings of HTTP/2."""
    connection.sendall(_PREFACE)
    head = b""
    while len(head) < _HEAD:
        data = connection.recv(_HEAD - len(head))
        if not data:
            return False
        head += data
    return head[3] == _SETTINGS


_ENDING = 10.0  # seconds that Ray may take to report the end of a worker


class IngotWorker:
    """A worker as an actor of Ray: one thread answers requests, another sends heartbeats."""

    def __init__(self) -> None:
        self._others = set(_threads())

    def run(self, line: bytes) -> bytes:
        """Answer a request."""
        self._others.discard(threading.get_native_id())
        return answer(line)

    def beat(self, seconds: float) -> bytes:
        """Return a heartbeat after ``seconds``; its processor time is that of threads that Ray did not start."""
        time.sleep(seconds)
        self._others.add(threading.get_native_id())
        used = sum(seconds for thread, seconds in _threads().items() if thread not in self._others)
        return messages.encode(Beat(used))


def _threads() -> dict[int, float]:
    """Return the processor time of each thread of this process."""
    import psutil

    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


class RayWorker:
    """An actor, and the calls that are under way. A ``Worker``."""

    def __init__(self, ray: Any, error: type[Exception], actor: Any, interval: float) -> None:
        self.beats = 0
        self.cpu = 0.0
        self._ray = ray
        self._error = error
        self._actor = actor
        self._interval = interval
        self._task: Any = None
        self._beat = self._next_beat(0.0)

    @property
    def name(self) -> str:
        """As ``Worker.name``."""
        return str(self._actor)

    def send(self, line: bytes) -> None:
        """As ``Worker.send``."""
        self._task = self._actor.run.options(concurrency_group="run").remote(line)

    def poll(self, seconds: float) -> bytes | None:
        """As ``Worker.poll``."""
        calls = [self._beat] if self._task is None else [self._task, self._beat]
        try:
            ready = self._ray.wait(calls, num_returns=1, timeout=seconds)[0]
            data = self._ray.get(ready[0]) if ready else None
        except Exception as error:  # Ray's own, and those of a connection that is gone
            raise WorkerLostError(f"{self.name} ended ({type(error).__name__})") from error
        if not ready:
            return None
        line = data if isinstance(data, bytes) else b""
        if ready[0] == self._task:
            self._task = None
            return line
        try:
            self.cpu = messages.decode(line, Beat).beat
        except InvalidMessageError as error:
            raise WorkerLostError(f"{self.name} sent something else than a heartbeat") from error
        self.beats += 1
        self._beat = self._next_beat(self._interval)
        return None

    def kill(self) -> None:
        """As ``Worker.kill``."""
        self._ray.kill(self._actor, no_restart=True)
        try:
            self._ray.get(self._next_beat(0.0), timeout=_ENDING)
        except self._error:
            return

    def _next_beat(self, seconds: float) -> Any:
        return self._actor.beat.options(concurrency_group="beat").remote(seconds)


class RayPool(WorkerPool):
    """The processors of a Ray cluster. A ``Pool``.

    Ray puts the driver's current folder, and that of its script, into the module search path of workers, unless the job
    has a working folder. This job has one, an empty one, so that workers import nothing from the folder of the data.

    Parameters
    ----------
    address : str
        As ``ray.init`` takes it. A connection that this process has already is used instead.
    threads : int
        Processors that a task takes.

    Raises ``ResourceError`` ``cluster.address`` if no cluster answers; ``UsageError`` ``cluster.timeout``.
    """

    def __init__(self, ray: Any, address: str, threads: int) -> None:
        timeout = worker_timeout()
        self._ray = ray
        self._per_task = threads
        self._error: type[Exception] = ray.exceptions.RayError
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user wants it
            try:
                with tempfile.TemporaryDirectory() as folder:
                    ray.init(
                        address=address,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        runtime_env={"working_dir": folder},
                    )
            except (ConnectionError, ValueError) as error:
                raise refusal(f"found none ({str(error)[:200]})", address) from error
        self._actor = ray.remote(
            num_cpus=threads,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"run": 1, "beat": 1},
        )(IngotWorker)
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        self.is_local = hosts <= {socket.gethostname()}
        super().__init__(self._start_worker, timeout, math.inf)  # the cluster may have other work first

    @property
    def slots(self) -> int:
        """As ``Pool.slots``: the processors of all nodes that are there now."""
        return int(self._ray.cluster_resources().get("CPU", 1)) // self._per_task or 1

    def close(self) -> None:
        """As ``Pool.close``; the cluster stays."""
        super().close()
        if self._connected_here:
            self._ray.shutdown()

    def _start_worker(self, interval: float) -> RayWorker:
        try:
            return RayWorker(self._ray, self._error, self._actor.remote(), interval)
        except Exception as error:
            raise WorkerLostError(f"Ray starts no worker: {type(error).__name__}: {str(error)[:200]}") from error


def ray_pool(address: str | None, threads: int) -> Pool:
    """Return the workers of a Ray cluster; those of this machine, with a warning, if no cluster is named.

    Ingot starts no Ray: its servers would listen on every network, and for one machine processes do the same.

    Raises ``MissingExtraError``; ``ResourceError`` ``cluster.address`` if a cluster is named and none answers.
    """
    ray = require("ray", "ray")
    if ray.is_initialized() or require_cluster(address):
        return RayPool(ray, address or "auto", threads)
    warnings.warn(
        "no Ray cluster is named (--address, RAY_ADDRESS, ray start): the processors of this machine do the work, as "
        "with --engine processes",
        stacklevel=2,
    )
    return Processes(max(default_workers() // threads, 1))
