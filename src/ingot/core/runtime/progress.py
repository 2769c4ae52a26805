"""Progress of a job, reported to a callback; the caller decides how to display it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """The state of a job that a progress callback receives.

    Parameters
    ----------
    processed, total : int
        Bytes of input that are processed so far, and in total.
    item : str
        The name of the tensor or file that is being processed.
    rates : mapping of str to float
        Bytes per second of each worker, if several workers do the job.
    """

    processed: int
    total: int
    item: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)


ProgressCallback = Callable[[ProgressEvent], None]


class Progress:
    """Counts bytes and calls a callback. Thread-safe; only one thread at a time runs the callback.

    Parameters
    ----------
    total : int
        Bytes in total.
    callback : callable, optional
        Called with a ``ProgressEvent`` after each ``advance``; an exception that it raises ends the job.
    processed : int
        Bytes that an earlier, interrupted run has processed.
    """

    def __init__(self, total: int, callback: ProgressCallback | None = None, processed: int = 0) -> None:
        self.total = total
        self.processed = processed
        self._callback = callback
        self._rates: Mapping[str, float] = {}
        self._guard = threading.Lock()

    def advance(self, count: int, item: str = "", rates: Mapping[str, float] | None = None) -> None:
        """Report that ``count`` more bytes are processed; ``item`` is the tensor.

        ``rates`` are bytes per second by worker.
        """
        if not count and self._callback is None:
            return
        with self._guard:
            self.processed += count
            self._rates = rates or self._rates
            if self._callback is not None:
                self._callback(ProgressEvent(self.processed, self.total, item, self._rates))
