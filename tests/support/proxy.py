"""A proxy for tests that stands before a server of somebody else and breaks connections; loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType


class FaultyProxy:
    """Passes bytes on to a server, and does what ``fault`` says with each connection; a context manager.

    Parameters
    ----------
    port : int
        Of the server, on this machine.
    fault : callable
        Gets the number of a connection, from 0; returns after how many bytes of the server's answers it is broken off,
        and how many seconds each piece waits. None for no fault.
    """

    def __init__(self, port: int, fault: Callable[[int], tuple[int, float] | None]) -> None:
        self._to, self._fault = port, fault
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._to))
                limit, pause = self._fault(self.connections) or (1 << 62, 0.0)
                self.connections += 1
                for pair in ((client, server, 1 << 62, 0.0), (server, client, limit, pause)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, limit: int, pause: float) -> None:
    """Pass on what one side says, up to ``limit`` bytes; then close both."""
    with contextlib.suppress(OSError):
        while limit > 0 and (data := source.recv(min(1 << 16, limit))):
            time.sleep(pause)
            target.sendall(data)
            limit -= len(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
        side.close()
