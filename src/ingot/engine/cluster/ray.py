"""Workers of a Ray cluster; this is the only module that knows Ray."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ingot.core.extras import require
from ingot.engine.cluster.listening import refusal, require_cluster
from ingot.engine.cluster.pool import packed_answer

R = TypeVar("R")
_STOPPING = 10.0  # seconds


class RayPool:
    """The processors of a Ray cluster. A ``Pool``.

    Parameters
    ----------
    address : str, optional
        Of a running cluster; by default that of ``RAY_ADDRESS``, or a cluster of this machine alone for this run.
    threads : int
        Processors that a task takes.

    Raises ``MissingExtraError``; ``ResourceError`` ``cluster.address`` where there is no cluster at the address.
    """

    def __init__(self, address: str | None, threads: int) -> None:
        self._ray = require("ray", "ray")
        self._own = not self._ray.is_initialized()
        if self._own:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user wants it
            require_cluster(address)
            try:
                self._ray.init(
                    address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False
                )
            except (ConnectionError, ValueError) as error:
                raise refusal(f"found none ({str(error)[:200]})", address) from error
        self.lost: tuple[type[BaseException], ...] = (require("ray.exceptions", "ray").RayError,)
        self._call = self._ray.remote(packed_answer).options(
            num_cpus=threads, max_retries=0, scheduling_strategy="SPREAD", name="ingot"
        )
        self._threads = threads
        self._running: set[Any] = set()

    @property
    def slots(self) -> int:
        """As ``Pool.slots``: the processors of all nodes that are there now."""
        return int(self._ray.cluster_resources().get("CPU", 1)) // self._threads or 1

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """As ``Pool.submit``."""
        reference = self._call.remote(function, arguments)
        self._running.add(reference)
        future: Future[R] = Future()

        def done(answered: Future[bytes]) -> None:
            self._running.discard(reference)
            try:
                good, result = pickle.loads(answered.result())  # noqa: S301 - of a worker of our own
            except BaseException as error:
                good, result = False, error
            if not future.set_running_or_notify_cancel():
                return
            if good:
                future.set_result(result)
            else:
                future.set_exception(result)

        reference.future().add_done_callback(done)
        return future

    def close(self) -> None:
        """As ``Pool.close``; a cluster that was there before stays."""
        left = list(self._running)
        for reference in left:
            self._ray.cancel(reference, force=True)
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=_STOPPING)
        if self._own:
            self._ray.shutdown()
