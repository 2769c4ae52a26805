"""Workers of a Ray cluster. No other module uses Ray."""

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
"""Seconds to wait for a connection, and for the first answer on it."""

# The preface of an HTTP/2 connection with empty settings (RFC 9113, 3.4 and 6.5). Ray's servers use HTTP/2.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HEAD = 9
_SETTINGS = 4

_CURRENT = "ray/ray_current_cluster"
_MAX_ADDRESS_BYTES = 1 << 12
_AUTO = "auto"
_NO_CLUSTER = ("", "local")


def require_cluster(address: str | None) -> bool:
    """Return whether a cluster is configured; if so, connect to it to check that it answers.

    Parameters
    ----------
    address : str, optional
        An address for ``ray.init``: host and port, optionally after ``ray://``, or ``auto`` or ``local``. By default,
        and for ``auto``, the address in ``RAY_ADDRESS``, or in the file that ``ray start`` writes.

    Raises
    ------
    ResourceError
        ``cluster.address``: no server with HTTP/2 answers within ``WAIT`` seconds; ``auto`` finds no address.
    """
    configured, origin = _configured_address(address)
    if configured in _NO_CLUSTER:
        if address == _AUTO:
            raise address_error("found no address", address)
        return False
    target = _host_and_port(configured)
    if target is None:  # only Ray can parse this address
        return True
    try:
        with socket.create_connection(target, WAIT) as connection:
            uses_tls = os.environ.get("RAY_USE_TLS", "0") not in ("", "0")
            is_cluster = uses_tls or _is_http2(connection)
    except OSError as error:
        raise address_error(f"connecting failed ({error})", configured, origin) from error
    if not is_cluster:
        raise address_error("found another server", configured, origin)
    return True


def address_error(reason: str, address: str | None, origin: str = "") -> ResourceError:
    """Return the error for an address without a cluster."""
    return ResourceError(
        f"expected a Ray cluster that answers{origin}, {reason}: start one by `ray start`, or give its --address",
        rule="cluster.address",
        where=address,
    )


def _configured_address(address: str | None) -> tuple[str, str]:
    """Return the address to which Ray would connect, and text that tells users where the address is configured.

    If Ray would start a new cluster, both texts are empty.
    """
    if address not in (None, "", _AUTO):
        return str(address), ""
    if variable := os.environ.get("RAY_ADDRESS", ""):
        return variable, " at the address in RAY_ADDRESS"
    folder = LocalStore(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "pread")  # noqa: S108 - as Ray
    try:
        text = folder.read(_CURRENT, _MAX_ADDRESS_BYTES, "cluster.address").decode()
    except (IngotError, UnicodeDecodeError):
        return "", ""
    return text.strip(), f" at the address in {folder.location_of(_CURRENT)} (`ray stop` removes it)"


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def _is_http2(connection: socket.socket) -> bool:
    """Return whether the server answers with HTTP/2 settings."""
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
        self._excluded_threads = set(_threads())

    def run(self, line: bytes) -> bytes:
        """Run the request in ``line`` and return the answer."""
        self._excluded_threads.discard(threading.get_native_id())
        return answer(line)

    def beat(self, seconds: float) -> bytes:
        """Return a heartbeat after ``seconds``, with the processor time of all threads that run tasks."""
        time.sleep(seconds)
        self._excluded_threads.add(threading.get_native_id())
        used = sum(seconds for thread, seconds in _threads().items() if thread not in self._excluded_threads)
        return messages.encode(Beat(used))


def _threads() -> dict[int, float]:
    """Return the processor time, in seconds, of each thread of this process by thread id."""
    import psutil

    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


class RayWorker:
    """An actor and its pending calls; implements ``Worker``."""

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
        """The actor's name, for error messages."""
        return str(self._actor)

    def send(self, line: bytes) -> None:
        """Send a request to the actor without waiting."""
        self._task = self._actor.run.options(concurrency_group="run").remote(line)

    def poll(self, seconds: float) -> bytes | None:
        """Return the actor's next answer; None after a heartbeat, or without an answer within ``seconds``."""
        calls = [self._beat] if self._task is None else [self._task, self._beat]
        try:
            ready = self._ray.wait(calls, num_returns=1, timeout=seconds)[0]
            data = self._ray.get(ready[0]) if ready else None
        except Exception as error:  # errors of Ray, and of a lost connection
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
            raise WorkerLostError(f"{self.name} sent an invalid heartbeat") from error
        self.beats += 1
        self._beat = self._next_beat(self._interval)
        return None

    def kill(self) -> None:
        """Kill the actor, even during a task."""
        self._ray.kill(self._actor, no_restart=True)
        try:
            self._ray.get(self._next_beat(0.0), timeout=_ENDING)
        except self._error:
            return

    def _next_beat(self, seconds: float) -> Any:
        return self._actor.beat.options(concurrency_group="beat").remote(seconds)


class RayPool(WorkerPool):
    """A pool of the processors of a Ray cluster.

    Ray adds the driver's current folder, and that of its script, to the module search path of workers, unless the job
    has a working folder. This job has an empty one, so that workers import no modules from the folder of the data.

    Parameters
    ----------
    address : str
        An address for ``ray.init``. If this process is already connected to a cluster, that cluster is used.
    threads : int
        Number of processors for each task.

    Raises
    ------
    ResourceError
        ``cluster.address``: no cluster answers.
    UsageError
        ``cluster.timeout``.
    """

    def __init__(self, ray: Any, address: str, threads: int) -> None:
        timeout = worker_timeout()
        self._ray = ray
        self._per_task = threads
        self._error: type[Exception] = ray.exceptions.RayError
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends usage statistics only if the user opts in
            try:
                with tempfile.TemporaryDirectory() as folder:
                    ray.init(
                        address=address,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        runtime_env={"working_dir": folder},
                    )
            except (ConnectionError, ValueError) as error:
                raise address_error(f"connecting failed ({str(error)[:200]})", address) from error
        self._actor = ray.remote(
            num_cpus=threads,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"run": 1, "beat": 1},
        )(IngotWorker)
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        self.is_local = hosts <= {socket.gethostname()}
        super().__init__(self._start_worker, timeout, math.inf)  # other jobs of the cluster may run first

    @property
    def slots(self) -> int:
        """The number of tasks that the processors of all present nodes can run at the same time."""
        return int(self._ray.cluster_resources().get("CPU", 1)) // self._per_task or 1

    def close(self) -> None:
        """Kill all workers and disconnect from the cluster, which keeps running."""
        super().close()
        if self._connected_here:
            self._ray.shutdown()

    def _start_worker(self, interval: float) -> RayWorker:
        try:
            return RayWorker(self._ray, self._error, self._actor.remote(), interval)
        except Exception as error:
            raise WorkerLostError(f"Ray cannot start a worker: {type(error).__name__}: {str(error)[:200]}") from error


def ray_pool(address: str | None, threads: int) -> Pool:
    """Return a pool of a Ray cluster; if no cluster is configured, warn and return processes of this machine.

    Ingot does not start Ray, because its servers would listen on every network, and processes suffice for one machine.
    Raises ``MissingExtraError``; ``ResourceError`` ``cluster.address`` if the configured cluster does not answer.
    """
    ray = require("ray", "ray")
    if ray.is_initialized() or require_cluster(address):
        return RayPool(ray, address or "auto", threads)
    warnings.warn(
        "no Ray cluster is named (--address, RAY_ADDRESS, ray start): using the processors of this machine, as with "
        "--engine processes",
        stacklevel=2,
    )
    return Processes(max(default_workers() // threads, 1))
