"""Worker processes of this machine: how they are started, and the pipes to them."""

from __future__ import annotations

import os
import subprocess
import threading
from queue import Empty, SimpleQueue

from ingot.cluster import messages
from ingot.cluster.messages import Beat, InvalidMessageError, WorkerLostError
from ingot.core.files.system import own_group
from ingot.core.isolation import isolated_command, isolated_environment

_ENDING = 10.0  # seconds that a killed process may take to end


class ProcessWorker:
    """A process and its pipes. A ``Worker``."""

    def __init__(self, interval: float) -> None:
        self.beats, self.cpu = 0, 0.0
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
