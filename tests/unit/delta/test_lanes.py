"""Hashing on a lane that several threads feed: each hash gets its bytes in the order in which they were given."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ingot.core.bytes.checksums import Blake3
from ingot.engine.hashing import HashThread


class Late:
    """A pool of one thread that never runs; who submits first is held up until another has, or a while."""

    def __init__(self) -> None:
        self.submitted: list[Future[None]] = []
        self.entered, self.more = threading.Event(), threading.Event()

    def submit(self, *_: Any) -> Future[None]:
        made: Future[None] = Future()
        self.submitted.append(made)
        if len(self.submitted) == 1:
            self.entered.set()
            self.more.wait(0.2)
        else:
            self.more.set()
        return made

    def shutdown(self, **_: Any) -> None:
        pass


def test_what_was_given_last_is_waited_for() -> None:
    pool, much, little = Late(), bytes(1 << 20), bytes(16)
    with HashThread("test") as lane:
        lane._pool.shutdown()
        lane._pool = pool  # type: ignore[assignment]
        first = threading.Thread(target=lane.submit, args=(Blake3(), much))
        first.start()
        pool.entered.wait()
        hash = Blake3()
        lane.submit(hash, much)
        first.join()
        pool.submitted[0].set_result(None)
        lane.submit(hash, little)  # behind what has not been hashed yet
    assert len(pool.submitted) == 3
