"""The minimum rate of a transfer.

The timeout for silence is not enough: a server that sends a byte every few seconds could keep a request open forever.
"""

from __future__ import annotations

import os
import time

from ingot.core.runtime.memory import parse_size
from ingot.errors import UsageError

VARIABLE = "INGOT_REMOTE_MIN_RATE"
DEFAULT_RATE = "1KiB"
OFF = "off"


class TooSlowError(Exception):
    """A server that sent less than the minimum rate during a window of time."""


def minimum_rate() -> int:
    """Return the minimum rate of a server in bytes per second; 0 without a minimum.

    Raises ``UsageError`` ``remote.min-rate`` if the environment variable is not a size.
    """
    text = os.environ.get(VARIABLE) or DEFAULT_RATE
    if text == OFF:
        return 0
    try:
        return parse_size(text)
    except UsageError:
        raise UsageError(
            f"expected {VARIABLE} to be bytes per second such as {DEFAULT_RATE}, or {OFF}, found {text[:40]!r}",
            rule="remote.min-rate",
        ) from None


class Pace:
    """A counter of an answer's bytes that raises an error if too few arrive within a window of time.

    Parameters
    ----------
    window : float
        The length of a window in seconds. The first window begins with the first bytes.
    """

    def __init__(self, window: float) -> None:
        self.window = window
        self._rate = minimum_rate()
        self._start = 0.0
        self._bytes = 0

    def count(self, nbytes: int) -> None:
        """Add ``nbytes`` arrived bytes; raise ``TooSlowError`` at the end of a window with too few."""
        now = time.monotonic()
        if not self._start:
            self._start = now
        self._bytes += nbytes
        seconds = now - self._start
        if seconds >= self.window:
            if self._bytes < self._rate * seconds:
                raise TooSlowError
            self._start = now
            self._bytes = 0
