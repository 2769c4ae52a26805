"""Progress as one callback; how it looks is the caller's matter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Where a job stands.

    Parameters
    ----------
    done, total : int
        Bytes of input dealt with so far, and in all.
    item : str
        What is being worked on: a tensor or file name.
    rates : mapping of str to float
        Where several workers do the job: the bytes per second of each.
    """

    done: int
    total: int
    item: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)


ProgressCallback = Callable[[ProgressEvent], None]


class Progress:
    """Counts bytes and tells a callback; safe to call from several threads, which call back one at a time.

    Parameters
    ----------
    total : int
        Bytes in all, known before the work begins.
    callback : callable, optional
        Called with a ``ProgressEvent`` after every ``advance``; an exception that it raises ends the job.
    done : int
        Bytes dealt with before, by a run that is being resumed.
    """

    def __init__(self, total: int, callback: ProgressCallback | None = None, done: int = 0) -> None:
        self.total = total
        self.done = done
        self._callback = callback
        self._rates: Mapping[str, float] = {}
        self._guard = threading.Lock()

    def advance(self, count: int, item: str = "", rates: Mapping[str, float] | None = None) -> None:
        """Add ``count`` bytes; ``rates`` are those of workers."""
        if not count and self._callback is None:
            return
        with self._guard:
            self.done += count
            self._rates = rates or self._rates
            if self._callback is not None:
                self._callback(ProgressEvent(self.done, self.total, item, self._rates))
